// The page: puts what the server sends into the state of the hosts, and shows that state.

import { makeRelease, makeRemoval, offerAdministration } from "./admin.js";
import { Connection } from "./connection.js";
import { Details } from "./details.js";
import { byId, phrase, setText, showEach } from "./dom.js";
import { addEvent, addLeaseEvent, addQueueEvent } from "./event_list.js";
import { FilterBar } from "./filter_bar.js";
import { seenOf } from "./gpu_condition.js";
import { HostSection } from "./host_section.js";
import { followOtherHosts } from "./other_hosts.js";
import { Host, now } from "./pool_state.js";
import { showQueue } from "./queue_list.js";
import { address, askQuietly } from "./server.js";
import { openStream } from "./stream.js";
import { countAll, showTotals } from "./totals.js";
import { offerUsage } from "./usage.js";

/** Of all GPUs together: with more GPUs, fewer readings of each are loaded, so that the page starts quickly. */
const MOST_READINGS = 2400;
/** More than this many are shown small. */
const MANY_GPUS = 24;
/** More than this many have the whole width, below the queue and the events, and a filter. */
const FEW_GPUS = 8;
const LIVING = new Set(["granted", "offered", "held", "quarantined", "idle"]);

const own = new Host("this host", { isOwn: true });
let others = [];
const connection = new Connection();
const details = new Details(own, show);
const sections = new Map();
const release = makeRelease(say);
const removal = makeRemoval(say);
const bar = new FilterBar(show, say);

// --- showing: at most once per frame, and at least once per second, as ages grow ---

let isDue = false;
let shownAt = 0;
let isPaused = false;

function show() {
  // A hidden tab draws no frames, but its title is visible.
  if (document.visibilityState === "hidden") showTitle(countAll([own, ...others].map(seenOf)));
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    shownAt = now();
    const hosts = [own, ...others];
    const isAlone = hosts.length === 1;
    connection.show(own);
    const seen = hosts.map(seenOf);
    const totals = countAll(seen);
    showTotals(totals);
    showTitle(totals);
    const isSpacious = totals.gpus <= FEW_GPUS;
    byId("columns").classList.toggle("beside", isSpacious);
    if (own.readAt !== null || !isAlone) {
      byId("hosts").querySelector(":scope > .empty")?.remove();
      const chosen = bar.filter.choose(seen);
      const common = { isAlone, isFiltered: bar.filter.isActive, isCrowded: totals.gpus > MANY_GPUS };
      const items = chosen.map((each) => ({ ...each, ...common }));
      showEach(byId("hosts"), sections, items, ({ host }) => host.key, () => new HostSection(release));
      bar.show(chosen.reduce((sum, { shown }) => sum + shown.length, 0), totals.gpus, !isSpacious);
    }
    showQueue(hosts, removal, isSpacious, show);
  });
}

/** A page that is paused has no present numbers. */
function showTitle(totals) {
  const name = others.length === 0 ? own.name : "GPU pool";
  const title = isPaused ? name : `${totals.free}/${totals.gpus} free · ${name}`;
  if (document.title !== title) document.title = title;
}

/** With a reading per second there is no need to. */
setInterval(() => {
  if (now() - shownAt > (own.intervalSeconds <= 1 ? 1500 : 900)) show();
}, 1000);

function say(words) {
  byId("said").replaceChildren(...[words].flat());
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
    if (fault === null) addEvent("free", "OK", `${name} can be used again`);
    else addEvent("trouble", gpu.missingSince !== null ? "Missing" : "Fault", phrase`${name}: ${fault}`);
  }
}

openStream({
  connected() {
    const isBack = connection.connected();
    if (isBack) {
      addEvent("free", "Connected", "to the server again");
      say("Connected again.");
      // The history has the readings of the meantime.
      loadHistory();
    }
    show();
  },
  disconnected() {
    connection.disconnected();
    addEvent("trouble", "Disconnected", "from the server");
    say("Disconnected from the server. The readings are getting old.");
    show();
  },
  paused() {
    isPaused = true;
    show();
  },
  resumed() {
    isPaused = false;
    connection.disconnected();
    addEvent("waiting", "Paused", "while this page was hidden");
    show();
  },
  snapshot(stats) {
    const isFirst = own.readAt === null;
    own.takeStats(stats);
    // Null means unknown, not none.
    if (!stats.gpus.some((row) => row.leases === null)) own.ledgerProblem = null;
    else if (own.ledgerProblem === null) {
      own.ledgerProblem = "the ledger cannot be read";
      details.askSoon();
    }
    tellFaults();
    if (isFirst) loadHistory();
    show();
  },
  health(health) {
    const before = own.health.status;
    own.health = health;
    if (health.status !== "healthy") addEvent("trouble", health.status === "degraded" ? "Degraded" : "Unhealthy", health.error ?? "");
    else if (before !== null && before !== "healthy") addEvent("free", "Healthy", "the readings are reliable again");
    show();
  },
  leases({ leases, waiting }) {
    own.takeLeases(leases);
    details.leasesWereSent();
    if (waiting === 0) own.takeQueue([]);
    else own.waiting = waiting;
    details.askSoon();
    show();
  },
  lease(event) {
    details.leasesHaveChanged();
    addLeaseEvent(event);
    if (LIVING.has(event.change)) own.takeLease(event.lease);
    else own.endLease(event.lease.lease_id);
    details.askSoon();
    show();
  },
  queue(event) {
    addQueueEvent(event);
    own.waiting = event.waiting;
    if (event.change === "left") own.queue = own.queue.filter((row) => row.request_id !== event.request.request_id);
    details.askSoon();
    show();
  },
});

// --- further requests ---

async function loadHistory() {
  const limit = Math.max(20, Math.min(90, Math.floor(MOST_READINGS / Math.max(1, own.gpus.size))));
  const history = await askQuietly(`gpu/history?limit=${limit}`);
  if (history !== null) own.takeHistory(history);
  show();
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
  byId("api-link").href = address(host.docs);
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
offerUsage();
