// Shows whether the page is connected, and how old its readings are.

import { byId, setAttribute, setHidden, setText } from "./dom.js";
import { now } from "./pool_state.js";
import { age as ageOf, duration, timeOfDay } from "./words.js";

export class Connection {
  #lostAt = null;
  #wasConnected = false;

  /** Returns whether this is a reconnection. */
  connected() {
    const isBack = this.#lostAt !== null && this.#wasConnected;
    this.#lostAt = null;
    this.#wasConnected = true;
    return isBack;
  }

  disconnected() {
    this.#lostAt ??= now();
  }

  show(host) {
    const age = host.ageSeconds();
    const old = age === null ? "" : ageOf(age);
    const [kind, text] = this.#words(host, old);
    setAttribute(byId("connection"), "data-kind", kind);
    setText(byId("connection-text"), text);
    const notice = this.#notice(host, age);
    setText(byId("notice"), notice);
    setHidden(byId("notice"), notice === "");
    document.body.classList.toggle("disconnected", this.#lostAt !== null);
  }

  #words(host, old) {
    if (this.#lostAt !== null) return ["trouble", "Disconnected"];
    if (!this.#wasConnected) return ["asking", "Connecting…"];
    if (host.health.status === "degraded" || host.health.status === "unhealthy") return ["trouble", old || "No readings"];
    return host.isStale ? ["trouble", old || "No readings"] : ["fine", `Live · ${old}`];
  }

  #notice(host, age) {
    if (this.#lostAt !== null) {
      const shown = age === null ? "There is nothing to show yet" : `What you see is ${duration(age)} old`;
      return `Disconnected since ${timeOfDay(this.#lostAt)}. ${shown}. Reconnecting…`;
    }
    const { status, error } = host.health;
    if (status !== "degraded" && status !== "unhealthy") {
      if (host.ledgerProblem !== null) return `The leases are unknown: ${host.ledgerProblem}`;
      return host.detailsProblem === null ? "" : `The reasons for waiting and the use of leases are unknown: ${host.detailsProblem}`;
    }
    const shown = age === null ? "There are no readings" : `The last readings are ${duration(age)} old`;
    return `${shown}: ${error ?? "no reason was given"}`;
  }
}
