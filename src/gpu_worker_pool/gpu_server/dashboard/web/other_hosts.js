// The other hosts, as this host's server sees them: the browser only connects to this server.

import { phrase } from "./dom.js";
import { addEvent, addLeaseEvent } from "./event_list.js";
import { now, Host } from "./pool_state.js";
import { askQuietly } from "./server.js";

const INTERVAL_SECONDS = 2;
/** Interval until the first answers have arrived. */
const FIRST_SECONDS = 0.5;
/** After a longer silence, such as a hidden tab, the history is loaded again. */
const SILENT_SECONDS = 10;

/** Calls `show(hosts)` with all hosts after every answer. */
export async function followOtherHosts(show) {
  const hosts = new Map();
  let heardAt = 0;
  for (;;) {
    const answer = document.visibilityState === "visible" ? await askQuietly("dashboard/peers") : null;
    if (answer !== null) {
      for (const peer of answer.peers) {
        if (!hosts.has(peer.name)) hosts.set(peer.name, newHost(peer));
        take(hosts.get(peer.name), peer);
      }
      const names = new Set(answer.peers.map((peer) => peer.name));
      for (const name of hosts.keys()) {
        // It is this host itself.
        if (!names.has(name)) hosts.delete(name);
      }
      const isAfterSilence = now() - heardAt > 1000 * SILENT_SECONDS;
      const isAsking = answer.peers.some((peer) => peer.status === "asking");
      if (!isAsking) heardAt = now();
      show([...hosts.values()]);
      // Not awaited: one slow host would make all others look old.
      if (isAfterSilence && !isAsking) loadHistories(hosts);
    }
    const seconds = heardAt === 0 ? FIRST_SECONDS : INTERVAL_SECONDS;
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
  }
}

async function loadHistories(hosts) {
  const history = await askQuietly("dashboard/peers/history");
  for (const [name, past] of Object.entries(history?.peers ?? {})) hosts.get(name)?.takeHistory(past);
}

function newHost(peer) {
  return new Host(peer.name, { isOwn: false, url: peer.url, intervalSeconds: INTERVAL_SECONDS });
}

function take(host, peer) {
  const wasReachable = host.problem === null;
  host.problem = peer.status === "silent" ? peer.problem : null;
  if (wasReachable && host.problem !== null) addEvent("trouble", "Unreachable", phrase`${host.name}: ${host.problem}`);
  if (!wasReachable && host.problem === null) addEvent("free", "Back", phrase`${host.name} answers again`);
  if (host.problem !== null || peer.health === undefined) return;
  host.health = peer.health;
  const age = (peer.sample_age_seconds ?? 0) + (peer.answered_seconds_ago ?? 0);
  // The server repeats the last answer until the next one.
  if (host.saidAt !== undefined && Math.abs(now() - peer.answered_seconds_ago * 1000 - host.saidAt) < 300) return;
  host.saidAt = now() - peer.answered_seconds_ago * 1000;
  if (peer.sample_age_seconds !== null) host.takeStats({ gpus: peer.gpus, sample_age_seconds: age });
  tellLeases(host, peer.leases);
  host.takeLeases(peer.leases);
  host.ledgerProblem = peer.ledger_problem;
  host.takeQueue(peer.queue, peer.waiting);
}

/** There is no stream of other hosts: leases are compared with the previous answer. */
function tellLeases(host, rows) {
  if (host.leases === null || rows === null) return;
  if (host.hasBeenSeen) {
    for (const row of rows) {
      if (!host.leases.has(row.lease_id)) addLeaseEvent({ change: "granted", lease: row }, host);
    }
    const ids = new Set(rows.map((row) => row.lease_id));
    for (const lease of host.leases.values()) {
      if (!ids.has(lease.lease_id)) addLeaseEvent({ change: "ended", lease }, host);
    }
  }
  host.hasBeenSeen = true;
}
