// One host: its GPUs, and its name and health if there are several hosts.

import { make, setAttribute, setHidden, setText, showEach } from "./dom.js";
import { GPUCard } from "./gpu_card.js";
import { age as ageOf, count } from "./words.js";

/** Up to this many are shown large. */
const FEW_GPUS = 8;
let sections = 0;

export class HostSection {
  #cards = new Map();

  constructor(release) {
    this.release = release;
    sections += 1;
    this.name = make("bdi", "");
    this.title = make("h3", "", this.name);
    this.title.id = `host-${sections}`;
    this.health = make("p", "health", make("span", "sign"), (this.healthText = make("span", "")));
    this.link = make("a", "", "its own page");
    setAttribute(this.link, "rel", "noreferrer noopener");
    this.head = make("div", "host-head", this.title, this.health, this.link);
    this.problem = make("p", "host-problem");
    this.cards = make("ul", "cards");
    this.empty = make("p", "empty");
    this.element = make("section", "host", this.head, this.problem, this.empty, this.cards);
    setAttribute(this.element, "aria-labelledby", this.title.id);
  }

  /** An error in the data of one host does not affect the others. */
  update(item) {
    setText(this.name, item.host.name);
    setAttribute(this.element, "data-host", item.host.name);
    try {
      if (item.error !== null) throw item.error;
      this.#draw(item);
    } catch (error) {
      setHidden(this.element, false);
      setText(this.problem, `This host sent data that cannot be shown: ${error.message}`);
      setHidden(this.problem, false);
    }
  }

  #draw({ host, gpus, shown, isAlone, isFiltered, isCrowded }) {
    this.head.classList.toggle("unseen", isAlone);
    setHidden(this.link, host.url === null);
    if (host.url !== null) setAttribute(this.link, "href", `${host.url}/dashboard`);
    const { kind, text, problem } = healthOf(host);
    setAttribute(this.health, "data-kind", kind);
    setText(this.healthText, text);
    setText(this.problem, problem);
    // The problem of a single host is shown at the top.
    setHidden(this.problem, problem === "" || isAlone);
    const nothing = host.readAt === null ? "" : "This host shows no GPU.";
    setText(this.empty, nothing);
    setHidden(this.empty, gpus.length > 0 || nothing === "");
    // A filter never hides the problem of a host.
    setHidden(this.element, isFiltered && shown.length === 0 && problem === "");
    this.cards.classList.toggle("few", isAlone && gpus.length <= FEW_GPUS);
    this.cards.classList.toggle("many", isCrowded);
    this.element.classList.toggle("stale", host.isStale);
    const items = shown.map((seen) => ({ ...seen, host, isCrowded }));
    showEach(this.cards, this.#cards, items, (item) => item.gpu.key, () => new GPUCard(this.release));
  }
}

function healthOf(host) {
  const age = host.ageSeconds();
  const old = age === null ? "no readings yet" : ageOf(age);
  if (host.problem !== null) return { kind: "trouble", text: `Not reachable, ${old}`, problem: host.problem };
  if (host.readAt === null && host.health.status === null) return { kind: "asking", text: "Connecting…", problem: "" };
  const { status, error } = host.health;
  if (status === "degraded" || status === "unhealthy") {
    const word = status === "degraded" ? "Degraded" : "Unhealthy";
    return { kind: "trouble", text: `${word}, ${old}`, problem: error ?? "no reason was given" };
  }
  if (host.isStale) return { kind: "trouble", text: `Stale, ${old}`, problem: "" };
  if (host.ledgerProblem !== null) {
    return { kind: "trouble", text: `Leases unknown, ${old}`, problem: `The leases are unknown: ${host.ledgerProblem}` };
  }
  return { kind: "fine", text: `Healthy, ${count(host.gpus.size, "GPU", "GPUs")}`, problem: "" };
}
