// What has happened since the page was opened, newest first.

import { byId, make, phrase, setHidden } from "./dom.js";
import { now } from "./pool_state.js";
import { count, duration, gpuNames, nameOf, timeOfDay } from "./words.js";

const MOST_KEPT = 100;

/** `kind` colours the word, and the word says it all the same; `words` is a text or a phrase. */
export function addEvent(kind, word, words, host = null) {
  const time = make("time", "", timeOfDay(now()));
  time.dateTime = new Date(now()).toISOString();
  const entry = make("li", "", time, " ", make("span", "what", word), " ", make("span", "text", ...[words].flat()));
  entry.dataset.kind = kind;
  if (host !== null) entry.append(make("span", "note", ...phrase` on ${host.name}`));
  const list = byId("events");
  list.prepend(entry);
  while (list.childElementCount > MOST_KEPT) list.lastElementChild.remove();
  setHidden(byId("events-empty"), true);
}

/** Where there is only one host, it need not be named. */
export function addLeaseEvent({ change, reasons, lease }, host = null) {
  const who = nameOf(lease);
  const gpus = gpuNames(lease.gpus);
  const label = labelled(lease);
  const why = reasons?.length ? phrase`: ${reasons.join("; ")}` : "";
  const held = `after ${duration(lease.held_seconds ?? null)}`;
  const known = {
    granted: ["held", "Granted", phrase`${gpus} to ${who}${label}`],
    offered: ["held", "Offered", phrase`${gpus} to ${who}${label}, who has to come back for it`],
    held: ["held", "Taken", phrase`${gpus} by ${who}${label}`],
    // By its holder, or by an administrator: who it was is not told.
    released: ["free", "Released", phrase`${gpus} of ${who} ${held}${why}`],
    quarantined: ["trouble", "Expired", phrase`${who} has lost ${gpus}${why}; in quarantine until it is seen to be empty`],
    reclaimed: ["free", "Reclaimed", phrase`${gpus}, which ${who} had${why}`],
    lost: ["trouble", "Lost", phrase`${gpus} of ${who}${why}`],
    idle: ["outside", "Idle", phrase`${who} has let ${gpus} idle for ${duration(lease.idle_seconds ?? null)}`],
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
    // What was granted is told by the lease.
    const words = { cancelled: "was taken back", given_up: "asks no more", timed_out: "waited too long", rejected: "can never be granted" };
    addEvent("waiting", "Left", phrase`${who}${label}: its request ${words[state] ?? `ended (${state})`}`);
  }
}

function labelled(row) {
  return row.label ? phrase` (${row.label})` : "";
}
