// Shows the first items of a list whole, and the others on request. So no list is cut in the middle of a line.

import { makeButton, setAttribute, setHidden, setText } from "./dom.js";

export class FoldedList {
  #isUnfolded = false;

  /** `changed` is called when more or fewer are to be shown. The caller puts `button` below the list. */
  constructor(changed) {
    this.button = makeButton("", () => {
      this.#isUnfolded = !this.#isUnfolded;
      changed();
    });
    this.button.className = "fold";
    this.button.hidden = true;
  }

  /** How many of `total` to show, if `most` is the number without a request for more. */
  shown(total, most) {
    setHidden(this.button, total <= most);
    setText(this.button, this.#isUnfolded ? `Show the first ${most}` : `Show all ${total}`);
    setAttribute(this.button, "aria-expanded", String(this.#isUnfolded));
    return this.#isUnfolded ? total : Math.min(total, most);
  }
}
