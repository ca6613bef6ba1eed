// The stream of the page, `/events`: opened again when it breaks, and checked when it is silent.

import { address, ask } from "./server.js";

const RETRY_MILLISECONDS = [500, 1000, 2000, 4000];
/** A connection may die unnoticed: after this silence, the server is asked whether it is up. */
const SILENT_MILLISECONDS = 10_000;
const UNSEEN_MILLISECONDS = 60_000;
const NAMES = ["snapshot", "health", "leases", "lease", "queue"];

/** `handlers` has a function for each of NAMES, and `connected()`, `disconnected()`; `paused()` while the page is hidden, then `resumed()`. */
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
    // The browser reconnects by itself, but not after every failure, and does not say when.
    opened.addEventListener("error", () => {
      if (opened === source) lose();
    });
  }

  async function checkSilence() {
    if (source === null || Date.now() - heardAt < SILENT_MILLISECONDS) return;
    const asked = source;
    const before = heardAt;
    try {
      const answer = await ask("health");
      if (answer.status >= 500) throw new Error("server error");
      // The server is up. Either it has nothing to send, as there was no reading; or the connection is broken.
      if (asked === source && before === heardAt) {
        const hasNews = answer.body?.sample_age_seconds * 1000 < Date.now() - before - 2000;
        if (!isConnected || hasNews) lose();
        else heardAt = Date.now();
      }
    } catch {
      if (asked === source && before === heardAt) lose();
    }
  }

  // A browser allows few connections per server: a page that has been hidden for a while uses none.
  let pause = null;
  let isPaused = false;
  document.addEventListener("visibilitychange", () => {
    clearTimeout(pause);
    if (document.visibilityState === "hidden") {
      pause = setTimeout(() => {
        close();
        isConnected = false;
        isPaused = true;
        handlers.paused();
      }, UNSEEN_MILLISECONDS);
    } else if (isPaused) {
      isPaused = false;
      handlers.resumed();
      open();
    }
  });
  window.addEventListener("online", () => {
    if (!isConnected && !isPaused) open();
  });
  setInterval(checkSilence, 2000);
  open();
}
