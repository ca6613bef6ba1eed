// One holder of a GPU: who, since when, and what it makes of what it was promised.

import { make, makeButton, setAttribute, setHidden, setText } from "./dom.js";
import { secondsSince } from "./pool_state.js";
import { duration, gibibytes, momentOf, nameOf } from "./words.js";

export class HolderLine {
  #lease = null;

  constructor(release) {
    this.name = make("strong", "name");
    this.label = make("span", "note");
    this.facts = make("span", "use");
    this.promised = make("span", "promised", " promised");
    this.idle = make("span", "tag");
    this.button = makeButton("Release…", () => release.ask(this.#lease));
    this.release = release;
    this.element = make(
      "li", "holder",
      make("span", "who-line", this.name, " ", this.label),
      make("span", "use-line", this.facts, this.promised, (this.where = make("span", "")), " ", this.idle),
      this.button,
    );
  }

  update(lease) {
    this.#lease = lease;
    setAttribute(this.element, "data-lease", lease.lease_id);
    setText(this.name, nameOf(lease));
    setAttribute(this.facts, "title", `since ${momentOf(lease.since)}`);
    setText(this.label, lease.label ?? "");
    setHidden(this.label, !lease.label);
    const isIdle = lease.is_idle === true;
    setHidden(this.idle, !isIdle);
    if (isIdle) setText(this.idle, `idle for ${duration(lease.idle_seconds ?? null)}`);
  }

  updateFor(host, totalMegabytes, isAlone) {
    const lease = this.#lease;
    const held = `for ${duration(secondsSince(lease.since))}`;
    const used = use(lease, totalMegabytes, isAlone);
    setText(this.facts, used === "" ? held : `${held} · ${used}`);
    setHidden(this.promised, used === "");
    const gpus = lease.gpus?.length ?? 1;
    setText(this.where, used !== "" && gpus > 1 ? ` on ${gpus} GPUs` : "");
    setHidden(this.button, !(host.isOwn && this.release.isPossible()));
    setAttribute(this.button, "aria-label", `Release the lease of ${nameOf(lease)}`);
  }
}

/** Used of what was promised; of a lease of several GPUs, of all of them together. */
function use(lease, totalMegabytes, isAlone) {
  const each = lease.memory_mb ?? totalMegabytes;
  if (each === null || each === undefined) return "";
  const promised = `${gibibytes(each * (lease.gpus?.length ?? 1))} GiB`;
  if (!isAlone || lease.memory_used_mb === null || lease.memory_used_mb === undefined) return promised;
  return `uses ${gibibytes(lease.memory_used_mb)} of ${promised}`;
}
