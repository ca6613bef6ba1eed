// The events since the page was opened, newest first.

import { byId, make, phrase, setHidden } from "./dom.js";
import { FoldedList } from "./folded_list.js";
import { now } from "./pool_state.js";
import { count, duration, gpuNames, nameOf, timeOfDay } from "./words.js";

const MOST_EVENTS = 100;
/** Unless all are asked for. */
const MOST_SHOWN = 6;
const fold = new FoldedList(showFirst);
byId("events").after(fold.button);

/** `kind` is the colour of `word`; `words` is a text or a phrase. */
export function addEvent(kind, word, words, host = null) {
  const time = make("time", "", timeOfDay(now()));
  time.dateTime = new Date(now()).toISOString();
  const entry = make("li", "", time, " ", make("span", "what", word), " ", make("span", "text", ...[words].flat()));
  entry.dataset.kind = kind;
  if (host !== null) entry.append(make("span", "note", ...phrase` on ${host.name}`));
  const list = byId("events");
  list.prepend(entry);
  while (list.childElementCount > MOST_EVENTS) list.lastElementChild.remove();
  setHidden(byId("events-empty"), true);
  showFirst();
}

function showFirst() {
  const events = [...byId("events").children];
  const shown = fold.shown(events.length, MOST_SHOWN);
  events.forEach((event, i) => setHidden(event, i >= shown));
}

/** `host` is only named where there are several. */
export function addLeaseEvent({ change, reasons, lease }, host = null) {
  const who = nameOf(lease);
  const gpus = gpuNames(lease.gpus);
  const label = labelled(lease);
  const why = reasons?.length ? phrase`: ${reasons.join("; ")}` : "";
  const held = `after ${duration(lease.held_seconds ?? null)}`;
  const known = {
    granted: ["held", "Granted", phrase`${gpus} to ${who}${label}`],
    offered: ["held", "Offered", phrase`${gpus} to ${who}${label}, until its client polls again`],
    held: ["held", "Taken", phrase`${gpus} by ${who}${label}`],
    // By its holder or by an administrator.
    released: ["free", "Released", phrase`${gpus} of ${who} ${held}${why}`],
    quarantined: ["trouble", "Expired", phrase`${who} has lost ${gpus}${why}; in quarantine until no process uses it`],
    reclaimed: ["free", "Reclaimed", phrase`${gpus}, which ${who} had${why}`],
    lost: ["trouble", "Lost", phrase`${gpus} of ${who}${why}`],
    idle: ["outside", "Idle", phrase`${who} has left ${gpus} idle for ${duration(lease.idle_seconds ?? null)}`],
    ended: ["free", "Ended", phrase`${gpus} of ${who}`],
  };
  const [kind, word, text] = known[change] ?? ["waiting", change, phrase`${gpus} of ${who}${why}`];
  addEvent(kind, word, text, host);
}

export function addQueueEvent({ change, state, request }) {
  const who = nameOf(request);
  const label = labelled(request);
  if (change === "waiting") {
    addEvent("waiting", "Waiting", phrase`${who}${label} for ${count(request.count ?? 1, "GPU", "GPUs")}`);
  } else if (state !== "granted") {
    // The lease event reports a grant.
    const words = { cancelled: "was cancelled", given_up: "was abandoned", timed_out: "waited too long", rejected: "can never be granted" };
    addEvent("waiting", "Left", phrase`${who}${label}: its request ${words[state] ?? `ended (${state})`}`);
  }
}

function labelled(row) {
  return row.label ? phrase` (${row.label})` : "";
}
