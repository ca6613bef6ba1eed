// The queue: who waits, for how long, and why, GPU by GPU.

import { byId, make, makeButton, phrase, setAttribute, setHidden, setText, showEach } from "./dom.js";
import { FoldedList } from "./folded_list.js";
import { secondsSince } from "./pool_state.js";
import { count, duration, fullNameOf, nameOf, unbroken } from "./words.js";

const views = new Map();

/** At most this many are listed; the number above counts all. */
const MOST_LISTED = 100;
/** Unless all are asked for: beside the GPUs, and above them. */
const MOST_BESIDE = 6;
const MOST_ABOVE = 3;
const MOST_REASONS = 8;
/** As in layout.css. */
const wide = matchMedia("(min-width: 62rem)");
let fold = null;

/** `isSpacious`: there are few GPUs, so the queue is beside them if the window is wide. */
export function showQueue(hosts, removal, isSpacious, show) {
  if (fold === null) {
    fold = new FoldedList(show);
    byId("queue").after(fold.button);
  }
  const isAlone = hosts.length === 1;
  const waiting = hosts.reduce((sum, host) => sum + host.waiting, 0);
  const isBeside = isSpacious && wide.matches;
  // There is room for the reasons of the next request.
  const items = hosts.flatMap((host) => host.queue.map((row, i) => ({ row, host, isAlone, isOpen: isBeside && i === 0 })));
  const shown = fold.shown(Math.min(items.length, MOST_LISTED), isBeside ? MOST_BESIDE : MOST_ABOVE);
  setText(byId("queue-count"), waiting > 0 ? String(waiting) : "");
  const isListed = items.length > 0 || waiting === 0;
  setText(byId("queue-empty"), isListed ? "No requests are waiting." : `${count(waiting, "request waits", "requests wait")}; loading the list…`);
  setHidden(byId("queue-empty"), items.length > 0);
  showEach(
    byId("queue"), views, items.slice(0, shown),
    ({ row, host }) => `${host.key} ${row.request_id}`,
    (item) => new WaiterLine(removal, item.isOpen),
  );
}

class WaiterLine {
  #row = null;
  #reasons = new Map();

  constructor(removal, isOpen) {
    this.removal = removal;
    this.position = make("span", "position");
    this.name = make("bdi", "name");
    this.label = make("bdi", "note");
    this.where = make("span", "where");
    this.time = make("span", "time");
    this.summary = make("p", "summary");
    this.gpus = make("ul", "reasons");
    this.fold = new FoldedList(() => this.#showReasons());
    this.reasonsTitle = make("summary", "", "GPU by GPU");
    this.details = make("details", "", this.reasonsTitle, this.gpus, this.fold.button);
    this.details.open = isOpen;
    this.details.addEventListener("toggle", () => this.#showReasons());
    this.button = makeButton("Remove…", () => removal.ask(this.#row));
    this.element = make(
      "li", "waiter",
      make("div", "waiter-head", this.position, (this.who = make("span", "who-line", this.name, " ", this.label, " ", this.where)), this.time),
      this.summary, this.details, this.button,
    );
  }

  /** Folded reasons are not updated. */
  #showReasons() {
    if (!this.details.open) return;
    const reasons = (this.#row.reasons ?? []).slice(1).map((text, i) => ({ text, i }));
    const shown = this.fold.shown(reasons.length, MOST_REASONS);
    showEach(this.gpus, this.#reasons, reasons.slice(0, shown), (each) => each.i, () => new Reason());
  }

  update({ row, host, isAlone }) {
    this.#row = row;
    setAttribute(this.element, "data-request", row.request_id);
    setText(this.position, String(row.position ?? ""));
    setText(this.name, nameOf(row));
    setText(this.label, row.label ?? "");
    setAttribute(this.who, "title", [fullNameOf(row), isAlone ? "" : host.name].filter(Boolean).join(" · "));
    setText(this.where, isAlone ? "" : phrase`on ${host.name}`);
    setText(this.time, duration(secondsSince(row.since)));
    const summary = row.reasons?.[0];
    setText(this.summary, summary ? unbroken(summary) : `wants ${count(row.count ?? 1, "GPU", "GPUs")}`);
    setHidden(this.details, !(row.reasons?.length > 1));
    this.#showReasons();
    setHidden(this.button, !(host.isOwn && this.removal.isPossible()));
    setAttribute(this.button, "aria-label", `Remove the request of ${nameOf(row)}`);
    setAttribute(this.gpus, "aria-label", "GPU by GPU");
    setAttribute(this.reasonsTitle, "aria-label", `Why ${nameOf(row)} waits, GPU by GPU`);
  }
}

class Reason {
  constructor() {
    this.gpu = make("strong", "");
    this.why = make("span", "");
    this.element = make("li", "", this.gpu, " ", this.why);
  }

  /** "GPU 3: held by ana for 12 s": what is before the colon is the GPU. */
  update({ text }) {
    const [, gpu, why] = /^(GPU [^:]+): (.*)$/s.exec(text) ?? [null, "", text];
    setText(this.gpu, unbroken(gpu));
    setText(this.why, unbroken(why));
  }
}
