// One holder of a GPU: who, since when, and how much of its memory it uses.

import { make, makeButton, setAttribute, setHidden, setText } from "./dom.js";
import { devicesOf, secondsSince } from "./pool_state.js";
import { duration, fullNameOf, gibibytes, momentOf, nameOf, unbroken } from "./words.js";

export class HolderLine {
  #lease = null;

  constructor(release) {
    this.name = make("bdi", "name");
    this.label = make("bdi", "note");
    this.device = make("span", "note");
    this.facts = make("span", "use");
    this.promised = make("span", "promised", " promised");
    this.idle = make("span", "tag");
    this.button = makeButton("Release…", () => release.ask(this.#lease));
    this.release = release;
    this.element = make(
      "li", "holder",
      (this.who = make("span", "who-line", this.name, " ", this.label)),
      this.device,
      make("span", "use-line", this.facts, this.promised, (this.where = make("span", "")), " ", this.idle),
      this.button,
    );
  }

  update(lease) {
    this.#lease = lease;
    setAttribute(this.element, "data-lease", lease.lease_id);
    setText(this.name, nameOf(lease));
    setAttribute(this.facts, "title", `since ${momentOf(lease.since)}`);
    const label = [lease.label, lease.within ? `inside ${lease.within}` : ""].filter(Boolean).join(" · ");
    setText(this.label, label);
    setHidden(this.label, label === "");
    // With many GPUs, the text may be cut off.
    setAttribute(this.who, "title", [fullNameOf(lease), lease.within ? `inside ${lease.within}` : ""].filter(Boolean).join(" · "));
    setText(this.button, lease.state === "quarantined" ? "End the quarantine…" : "Release…");
    const isIdle = lease.is_idle === true;
    setHidden(this.idle, !isIdle);
    if (isIdle) setText(this.idle, `idle for ${duration(lease.idle_seconds ?? null)}`);
  }

  updateFor(host, row, isAlone) {
    const lease = this.#lease;
    const devices = devicesOf(lease, row);
    setText(this.device, devices.length === 0 ? "" : `on ${devices.map(deviceName).join(", ")}`);
    setHidden(this.device, devices.length === 0);
    const held = `for ${duration(secondsSince(lease.since))}`;
    const used = use(lease, (devices[0] ?? row).memory?.total_mb, isAlone);
    setText(this.facts, unbroken(used === "" ? held : `${held} · ${used}`));
    setHidden(this.promised, used === "");
    const gpus = lease.gpus?.length ?? 1;
    setText(this.where, used !== "" && gpus > 1 ? ` on ${gpus} GPUs` : "");
    setHidden(this.button, !(host.isOwn && this.release.isPossible()));
    setAttribute(this.button, "aria-label", `${lease.state === "quarantined" ? "End the quarantine" : "Release the lease"} of ${nameOf(lease)}`);
  }
}

/** Older drivers name devices by the GPU's UUID and numbers at the end; those are shown in full. */
function deviceName({ name, uuid }) {
  return `${name ?? "MIG"} (${uuid.includes("/") ? uuid : uuid.slice(0, 12)})`;
}

/** Used of promised memory, of all GPUs of the lease together. */
function use(lease, totalMegabytes, isAlone) {
  const each = lease.memory_mb ?? totalMegabytes;
  if (each === null || each === undefined) return "";
  const promised = `${gibibytes(each * (lease.gpus?.length ?? 1))} GiB`;
  if (!isAlone || lease.memory_used_mb === null || lease.memory_used_mb === undefined) return promised;
  return `uses ${gibibytes(lease.memory_used_mb)} of ${promised}`;
}
