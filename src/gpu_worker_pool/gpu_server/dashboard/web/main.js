// The page: what comes from the server goes into the hosts' state, and the state is shown.

import { makeRelease, makeRemoval, offerAdministration } from "./admin.js";
import { Connection } from "./connection.js";
import { byId, setText, showEach } from "./dom.js";
import { addEvent, addLeaseEvent, addQueueEvent } from "./event_list.js";
import { HostSection } from "./host_section.js";
import { followOtherHosts } from "./other_hosts.js";
import { Host, now } from "./pool_state.js";
import { showQueue } from "./queue_list.js";
import { ask, askQuietly } from "./server.js";
import { openStream } from "./stream.js";
import { showTotals } from "./totals.js";
import { duration } from "./words.js";

/** What leases make of their GPUs, and why somebody waits, is not in the stream. */
const ASK_SECONDS = 3;
/** Large answers are asked for less often: so many bytes are one more second. */
const BYTES_A_SECOND = 50_000;
/** Of all GPUs together: the more there are, the less is asked for of each, so that the page begins at once. */
const MOST_READINGS = 2400;
/** More than so many are shown small. */
const MANY_GPUS = 24;
const LIVING = new Set(["granted", "offered", "held", "quarantined", "idle"]);

const own = new Host("this host", { isOwn: true });
let others = [];
const connection = new Connection();
const sections = new Map();
const release = makeRelease(say);
const removal = makeRemoval(say);

// --- showing: at most once a frame, and once a second for what grows older ---

let isDue = false;
let shownAt = 0;

function show() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    shownAt = now();
    const hosts = [own, ...others];
    const isAlone = hosts.length === 1;
    connection.show(own);
    const totals = showTotals(hosts);
    const title = `${totals.free}/${totals.gpus} free · ${isAlone ? own.name : "GPU pool"}`;
    if (document.title !== title) document.title = title;
    if (own.readAt !== null || !isAlone) {
      byId("hosts").querySelector(":scope > .empty")?.remove();
      const items = hosts.map((host) => ({ host, isAlone, isCrowded: totals.gpus > MANY_GPUS }));
      showEach(byId("hosts"), sections, items, ({ host }) => host.key, () => new HostSection(release));
    }
    showQueue(hosts, removal);
  });
}

/** With a reading a second there is no need to. */
setInterval(() => {
  if (now() - shownAt > (own.intervalSeconds <= 1 ? 1500 : 900)) show();
}, 1000);

function say(text) {
  byId("said").textContent = text;
}

// --- the stream ---

const faults = new Map();

function tellFaults() {
  for (const gpu of own.gpus.values()) {
    const fault = gpu.missingSince !== null ? "missing from the readings" : (gpu.row.fault ?? null);
    const before = faults.get(gpu.key) ?? null;
    if (fault === before) continue;
    faults.set(gpu.key, fault);
    const name = `GPU ${gpu.row.gpu_id}`;
    if (fault === null) addEvent("free", "Well", `${name} can be used again`);
    else addEvent("trouble", gpu.missingSince !== null ? "Missing" : "Fault", `${name}: ${fault}`);
  }
}

openStream({
  connected() {
    const isBack = connection.connected();
    if (isBack) {
      addEvent("free", "Connected", "to the server again");
      say("Connected again.");
      // What happened meanwhile is in the history.
      loadHistory();
    }
    show();
  },
  disconnected() {
    connection.disconnected();
    addEvent("trouble", "Disconnected", "from the server");
    say("Disconnected from the server. What is shown grows old.");
    show();
  },
  rested() {
    connection.disconnected();
    addEvent("waiting", "Rested", "while nobody looked at this page");
    show();
  },
  snapshot(stats) {
    const isFirst = own.readAt === null;
    own.takeStats(stats);
    // Null is not the same as none.
    if (!stats.gpus.some((row) => row.leases === null)) own.ledgerProblem = null;
    else if (own.ledgerProblem === null) {
      own.ledgerProblem = "the ledger cannot be read";
      askSoon();
    }
    tellFaults();
    if (isFirst) loadHistory();
    show();
  },
  health(health) {
    const before = own.health.status;
    own.health = health;
    if (health.status !== "healthy") addEvent("trouble", health.status === "degraded" ? "Degraded" : "Unhealthy", health.error ?? "");
    else if (before !== null && before !== "healthy") addEvent("free", "Healthy", "the readings can be relied on again");
    show();
  },
  leases({ leases, waiting }) {
    own.takeLeases(leases);
    leasesAt = now();
    if (waiting === 0) own.takeQueue([]);
    else own.waiting = waiting;
    askSoon();
    show();
  },
  lease(event) {
    leaseEvents += 1;
    addLeaseEvent(event);
    if (LIVING.has(event.change)) own.takeLease(event.lease);
    else own.endLease(event.lease.lease_id);
    askSoon();
    show();
  },
  queue(event) {
    addQueueEvent(event);
    own.waiting = event.waiting;
    if (event.change === "left") own.queue = own.queue.filter((row) => row.request_id !== event.request.request_id);
    askSoon();
    show();
  },
});

// --- what is asked for besides ---

async function loadHistory() {
  const limit = Math.max(20, Math.min(90, Math.floor(MOST_READINGS / Math.max(1, own.gpus.size))));
  const history = await askQuietly(`gpu/history?limit=${limit}`);
  if (history !== null) own.takeHistory(history);
  show();
}

let leaseEvents = 0;
let leasesAt = 0;
let timer = null;
let isAsking = false;
let isWanted = false;

function askSoon() {
  isWanted = true;
  if (!isAsking) schedule(0.1);
}

function schedule(seconds) {
  clearTimeout(timer);
  timer = setTimeout(askOnce, 1000 * seconds);
}

/** The queue with its reasons, and what holders use; the stream has told already that they are there. */
async function askOnce() {
  if (isAsking) return;
  const isForAnEvent = isWanted;
  isAsking = true;
  isWanted = false;
  let seconds = ASK_SECONDS;
  try {
    if (document.visibilityState === "visible") {
      if (own.waiting > 0 || own.queue.length > 0) {
        const { status, body, bytes } = await ask("queue");
        if (status === 200) own.takeQueue(body.queue);
        seconds += bytes / BYTES_A_SECOND;
      }
      if ((own.leases?.size || own.ledgerProblem !== null) && now() - leasesAt > 1000 * (ASK_SECONDS - 0.5)) {
        leasesAt = now();
        const before = leaseEvents;
        const { status, body, bytes } = await ask("leases");
        // What the stream told meanwhile is newer.
        if (status === 200 && before === leaseEvents) own.takeLeases(body.leases);
        if (status === 503 && own.ledgerProblem !== null) own.ledgerProblem = body?.detail ?? own.ledgerProblem;
        seconds += bytes / BYTES_A_SECOND;
      }
      if (own.health.status !== null && own.health.status !== "healthy") {
        // The stream told why it began; how long it has lasted, changes.
        const { body } = await ask("health");
        if (body?.status) own.health = body;
      }
      // Else the next reading shows it, too.
      if (isForAnEvent) show();
    }
  } catch {
    // The stream notices that nobody is there, and says so.
  } finally {
    isAsking = false;
    schedule(isWanted ? 0.5 : seconds);
  }
}

async function getToKnow() {
  const host = await askQuietly("dashboard/host");
  if (host === null) {
    setTimeout(getToKnow, 2000);
    return;
  }
  own.name = host.name;
  own.intervalSeconds = host.refresh_interval;
  setText(byId("host-name"), host.peers.length > 0 ? `seen from ${host.name}` : host.name);
  setText(byId("chart-span"), `the last ${Math.round(own.chartSeconds)} s`);
  show();
  if (host.peers.length > 0) {
    followOtherHosts((hosts) => {
      others = hosts;
      show();
    });
  }
}

offerAdministration(show, say);
getToKnow();
