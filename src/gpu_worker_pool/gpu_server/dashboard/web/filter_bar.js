// The filter of the GPUs on the page: its text, its chips, what it leaves, and the page's address, which remembers it.

import { byId, setHidden, setText } from "./dom.js";
import { GPUFilter } from "./gpu_filter.js";
import { count } from "./words.js";

/** After the last change, so that not every letter is read aloud or put into the address. */
const REST_MILLISECONDS = 400;

export class FilterBar {
  filter = GPUFilter.fromHash(location.hash) ?? new GPUFilter();
  #changed;
  #say;
  #words = "";
  #rest = null;

  /** `onChange` is called when other GPUs are to be shown; `say(words)` speaks to screen readers. */
  constructor(onChange, say) {
    this.#changed = onChange;
    this.#say = say;
    const form = byId("filter");
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", () => this.#set(new GPUFilter(byId("filter-text").value, form.elements.show.value)));
    byId("filter-text").addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || byId("filter-text").value === "") return;
      event.preventDefault();
      byId("filter-text").value = "";
      this.#set(new GPUFilter("", this.filter.show));
    });
    byId("filter-clear").addEventListener("click", () => this.#clear());
    window.addEventListener("hashchange", () => this.#readAddress());
    this.#write();
  }

  /** `isOffered`: whether there are enough GPUs for a filter. An active one can always be seen and cleared. */
  show(shown, total, isOffered) {
    const { isActive } = this.filter;
    setHidden(byId("filter"), !isOffered && !isActive);
    this.#words = isActive ? `${shown} of ${total} shown` : count(total, "GPU", "GPUs");
    setText(byId("filter-count"), this.#words);
    setHidden(byId("filter-clear"), !isActive);
    setHidden(byId("filter-none"), !isActive || shown > 0 || total === 0);
  }

  #set(filter) {
    this.filter = filter;
    this.#changed();
    clearTimeout(this.#rest);
    this.#rest = setTimeout(() => {
      this.#writeAddress();
      this.#say(byId("filter-none").hidden ? this.#words : "No GPU matches.");
    }, REST_MILLISECONDS);
  }

  #clear() {
    this.#set(new GPUFilter());
    this.#write();
    // The pressed button is about to vanish.
    byId("filter-text").focus();
  }

  #write() {
    byId("filter-text").value = this.filter.text;
    byId("filter").elements.show.value = this.filter.show;
  }

  #writeAddress() {
    const hash = this.filter.toHash();
    if (location.hash !== hash) history.replaceState(null, "", hash || location.pathname + location.search);
  }

  #readAddress() {
    const read = GPUFilter.fromHash(location.hash);
    if (read === null && location.hash !== "") {
      // A link to a part of this page: the browser has gone there, and the filter stays.
      if (this.filter.isActive) this.#writeAddress();
      return;
    }
    this.filter = read ?? new GPUFilter();
    this.#write();
    this.#changed();
  }
}
