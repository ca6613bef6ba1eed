// What the stream does not tell: why somebody waits, what holders use, how long trouble has lasted. Asked for besides.

import { now } from "./pool_state.js";
import { ask } from "./server.js";

const ASK_SECONDS = 3;
/** Large answers are asked for less often: so many bytes are one more second. */
const BYTES_A_SECOND = 50_000;

export class Details {
  #host;
  #show;
  #timer = null;
  #isAsking = false;
  /** Whether something has happened since it was last asked. */
  #isWanted = false;
  #leaseChanges = 0;
  #leasesAt = 0;

  /** `show` is called when an answer to something that happened is there. */
  constructor(host, show) {
    this.#host = host;
    this.#show = show;
  }

  askSoon() {
    this.#isWanted = true;
    if (!this.#isAsking) this.#schedule(0.1);
  }

  /** The stream told of all of them: there is no need to ask at once. */
  leasesWereTold() {
    this.#leasesAt = now();
  }

  /** An answer that is on its way may not know it yet. */
  leasesHaveChanged() {
    this.#leaseChanges += 1;
  }

  #schedule(seconds) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#ask(), 1000 * seconds);
  }

  async #ask() {
    if (this.#isAsking) return;
    const isForAnEvent = this.#isWanted;
    this.#isAsking = true;
    this.#isWanted = false;
    const host = this.#host;
    let bytes = 0;
    try {
      if (document.visibilityState === "visible") {
        bytes = (await this.#askForQueue()) + (await this.#askForLeases());
        await this.#askForHealth();
        host.detailsProblem = null;
        // Else the next reading shows it, too.
        if (isForAnEvent) this.#show();
      }
    } catch (error) {
      // The stream notices that nobody is there, and says so. If it goes on, it has what a browser spares one server.
      if (error.name === "TimeoutError") {
        host.detailsProblem = "no answer to what was asked; perhaps too many pages of this server are open in this browser";
      }
    } finally {
      this.#isAsking = false;
      this.#schedule(this.#isWanted ? 0.5 : ASK_SECONDS + bytes / BYTES_A_SECOND);
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
    // What the stream told meanwhile is newer.
    if (status === 200 && before === this.#leaseChanges) host.takeLeases(body.leases);
    if (status === 503 && host.ledgerProblem !== null) host.ledgerProblem = body?.detail ?? host.ledgerProblem;
    return bytes;
  }

  async #askForHealth() {
    const host = this.#host;
    if (host.health.status === null || host.health.status === "healthy") return;
    // The stream told why it began; how long it has lasted, changes.
    const { body } = await ask("health");
    // That it has ended, the stream tells, as well.
    if (body?.status === host.health.status) host.health = body;
  }
}
