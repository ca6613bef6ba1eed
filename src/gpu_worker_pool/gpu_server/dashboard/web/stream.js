// The one stream of the page, `/events`: kept open, opened again when it breaks, and doubted when it is silent.

import { address, ask } from "./server.js";

const RETRY_MILLISECONDS = [500, 1000, 2000, 4000];
/** A connection may die without a word: then it is asked whether anybody is there. */
const SILENT_MILLISECONDS = 10_000;
const UNSEEN_MILLISECONDS = 60_000;
const NAMES = ["snapshot", "health", "leases", "lease", "queue"];

/** `handlers` has a function for each of NAMES, and `connected()`, `disconnected()`; `rests()` while nobody looks, then `rested()`. */
export function openStream(handlers) {
  let source = null;
  let failures = 0;
  let retry = null;
  let heardAt = Date.now();
  let isConnected = false;

  function heard() {
    heardAt = Date.now();
    if (!isConnected) {
      isConnected = true;
      failures = 0;
      handlers.connected();
    }
  }

  function close() {
    clearTimeout(retry);
    source?.close();
    source = null;
  }

  function lose() {
    close();
    if (isConnected || failures === 0) handlers.disconnected();
    isConnected = false;
    retry = setTimeout(open, RETRY_MILLISECONDS[Math.min(failures, RETRY_MILLISECONDS.length - 1)]);
    failures += 1;
  }

  function open() {
    close();
    heardAt = Date.now();
    const opened = (source = new EventSource(address("events")));
    for (const name of NAMES) {
      opened.addEventListener(name, (event) => {
        if (opened !== source) return;
        heard();
        handlers[name](JSON.parse(event.data));
      });
    }
    // The browser would try again by itself, but not after every kind of failure, nor say when.
    opened.addEventListener("error", () => {
      if (opened === source) lose();
    });
  }

  async function doubt() {
    if (source === null || Date.now() - heardAt < SILENT_MILLISECONDS) return;
    const asked = source;
    const before = heardAt;
    try {
      const answer = await ask("health");
      if (answer.status >= 500) throw new Error("it is not there");
      // It lives. Either it has nothing to say, as there was no reading for so long; or nothing comes through.
      if (asked === source && before === heardAt) {
        const hasNews = answer.body?.sample_age_seconds * 1000 < Date.now() - before - 2000;
        if (!isConnected || hasNews) lose();
        else heardAt = Date.now();
      }
    } catch {
      if (asked === source && before === heardAt) lose();
    }
  }

  // A browser gives one server few connections: a page that nobody has seen for a while keeps none of them.
  let rest = null;
  let isResting = false;
  document.addEventListener("visibilitychange", () => {
    clearTimeout(rest);
    if (document.visibilityState === "hidden") {
      rest = setTimeout(() => {
        close();
        isConnected = false;
        isResting = true;
        handlers.rests();
      }, UNSEEN_MILLISECONDS);
    } else if (isResting) {
      isResting = false;
      handlers.rested();
      open();
    }
  });
  window.addEventListener("online", () => {
    if (!isConnected && !isResting) open();
  });
  setInterval(doubt, 2000);
  open();
}
