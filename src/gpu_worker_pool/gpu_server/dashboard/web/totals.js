// The totals, large enough to be read from across the room.

import { byId, make, setAttribute, setText } from "./dom.js";

const NUMBERS = [
  ["free", "Free"],
  ["held", "Held"],
  ["outside", "In use"],
  ["trouble", "Trouble"],
  ["waiting", "Waiting"],
];
const shown = new Map();

/** `seen`: for each host `{ host, gpus }`, its GPUs with their conditions. */
export function countAll(seen) {
  const numbers = { free: 0, held: 0, outside: 0, trouble: 0, waiting: 0 };
  let total = 0;
  for (const { host, gpus } of seen) {
    total += gpus.length;
    numbers.waiting += host.waiting;
    // Its GPUs are unknown; it counts as one problem.
    if (host.problem !== null && gpus.length === 0) numbers.trouble += 1;
    for (const { condition } of gpus) numbers[condition.kind] += 1;
  }
  return { ...numbers, gpus: total };
}

export function showTotals(numbers) {
  for (const [kind, name] of NUMBERS) {
    if (!shown.has(kind)) {
      const number = make("dd", "number");
      const text = make("span", "", name);
      if (kind === "outside") text.append(make("span", "wide", " without a lease"));
      const label = make("dt", "", make("span", "sign"), text);
      const tile = make("div", "total", number, label);
      setAttribute(tile, "data-kind", kind);
      shown.set(kind, { tile, number });
      byId("totals").append(tile);
    }
    const { tile, number } = shown.get(kind);
    setText(number, String(numbers[kind]));
    tile.classList.toggle("none", numbers[kind] === 0);
  }
}
