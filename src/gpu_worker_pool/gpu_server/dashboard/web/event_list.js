// What has happened since the page was opened, newest first.

import { byId, make, setHidden } from "./dom.js";
import { now } from "./pool_state.js";
import { count, duration, gpuNames, nameOf, timeOfDay } from "./words.js";

const MOST_KEPT = 100;

/** `kind` colours the word, and the word says it all the same. */
export function addEvent(kind, word, text, host = null) {
  const time = make("time", "", timeOfDay(now()));
  time.dateTime = new Date(now()).toISOString();
  const entry = make("li", "", time, " ", make("span", "what", word), " ", make("span", "text", text));
  entry.dataset.kind = kind;
  if (host !== null) entry.append(make("span", "note", ` on ${host.name}`));
  const list = byId("events");
  list.prepend(entry);
  while (list.childElementCount > MOST_KEPT) list.lastElementChild.remove();
  setHidden(byId("events-empty"), true);
}

/** Where there is only one host, it need not be named. */
export function addLeaseEvent({ change, reasons, lease }, host = null) {
  const who = nameOf(lease);
  const gpus = gpuNames(lease.gpus);
  const label = lease.label ? ` (${lease.label})` : "";
  const why = reasons?.length ? `: ${reasons.join("; ")}` : "";
  const held = `after ${duration(lease.held_seconds ?? 0)}`;
  const known = {
    granted: ["held", "Granted", `${gpus} to ${who}${label}`],
    offered: ["held", "Offered", `${gpus} to ${who}${label}, who has to come back for it`],
    held: ["held", "Taken", `${gpus} by ${who}${label}`],
    released: ["free", "Released", `${gpus} by ${who} ${held}`],
    quarantined: ["trouble", "Expired", `${who} has lost ${gpus}${why}; in quarantine until it is seen to be empty`],
    reclaimed: ["free", "Reclaimed", `${gpus}, which ${who} had${why}`],
    lost: ["trouble", "Lost", `${gpus} of ${who}${why}`],
    idle: ["outside", "Idle", `${who} has let ${gpus} idle for ${duration(lease.idle_seconds ?? 0)}`],
    ended: ["free", "Ended", `${gpus} of ${who}`],
  };
  const [kind, word, text] = known[change] ?? ["waiting", change, `${gpus} of ${who}${why}`];
  addEvent(kind, word, text, host);
}

export function addQueueEvent({ change, state, request }) {
  const who = nameOf(request);
  const label = request.label ? ` (${request.label})` : "";
  if (change === "waiting") {
    addEvent("waiting", "Waiting", `${who}${label} for ${count(request.count ?? 1, "GPU", "GPUs")}`);
  } else if (state !== "granted") {
    // What was granted is told by the lease.
    const words = { cancelled: "was taken back", given_up: "asks no more", timed_out: "waited too long", rejected: "can never be granted" };
    addEvent("waiting", "Left", `${who}${label}: its request ${words[state] ?? `ended (${state})`}`);
  }
}
