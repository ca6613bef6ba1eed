// Polls what the stream does not send: why requests wait, what holders use, how long a problem has lasted.

import { now } from "./pool_state.js";
import { ask } from "./server.js";

const ASK_SECONDS = 3;
/** Large answers are polled less often: this many bytes add a second. */
const BYTES_PER_SECOND = 50_000;

export class Details {
  #host;
  #show;
  #timer = null;
  #isPolling = false;
  /** Whether something has happened since the last poll. */
  #isWanted = false;
  #leaseChanges = 0;
  #leasesAt = 0;

  /** `show` is called with the answer to a poll that an event caused. */
  constructor(host, show) {
    this.#host = host;
    this.#show = show;
  }

  askSoon() {
    this.#isWanted = true;
    if (!this.#isPolling) this.#schedule(0.1);
  }

  /** The stream sent all leases: there is no need to poll at once. */
  leasesWereSent() {
    this.#leasesAt = now();
  }

  /** An answer that is on its way may be older than the change. */
  leasesHaveChanged() {
    this.#leaseChanges += 1;
  }

  #schedule(seconds) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#ask(), 1000 * seconds);
  }

  async #ask() {
    if (this.#isPolling) return;
    const isForAnEvent = this.#isWanted;
    this.#isPolling = true;
    this.#isWanted = false;
    const host = this.#host;
    let bytes = 0;
    try {
      if (document.visibilityState === "visible") {
        bytes = (await this.#askForQueue()) + (await this.#askForLeases());
        await this.#askForHealth();
        host.detailsProblem = null;
        // Otherwise the next reading shows it.
        if (isForAnEvent) this.#show();
      }
    } catch (error) {
      // The stream reports a server that is down. If the stream works, all other connections of the browser are in use.
      if (error.name === "TimeoutError") {
        host.detailsProblem = "no answer; perhaps too many pages of this server are open in this browser";
      }
    } finally {
      this.#isPolling = false;
      this.#schedule(this.#isWanted ? 0.5 : ASK_SECONDS + bytes / BYTES_PER_SECOND);
    }
  }

  async #askForQueue() {
    const host = this.#host;
    if (host.waiting === 0 && host.queue.length === 0) return 0;
    const { status, body, bytes } = await ask("queue");
    if (status === 200) host.takeQueue(body.queue);
    return bytes;
  }

  async #askForLeases() {
    const host = this.#host;
    if (!host.leases?.size && host.ledgerProblem === null) return 0;
    if (now() - this.#leasesAt <= 1000 * (ASK_SECONDS - 0.5)) return 0;
    this.#leasesAt = now();
    const before = this.#leaseChanges;
    const { status, body, bytes } = await ask("leases");
    // Changes that the stream sent in the meantime are newer.
    if (status === 200 && before === this.#leaseChanges) host.takeLeases(body.leases);
    if (status === 503 && host.ledgerProblem !== null) host.ledgerProblem = body?.detail ?? host.ledgerProblem;
    return bytes;
  }

  async #askForHealth() {
    const host = this.#host;
    if (host.health.status === null || host.health.status === "healthy") return;
    // The stream sent the cause once; the time that it has lasted grows.
    const { body } = await ask("health");
    // The stream reports the end.
    if (body?.status === host.health.status) host.health = body;
  }
}
