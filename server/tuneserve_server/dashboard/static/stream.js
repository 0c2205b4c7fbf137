// Server-sent events, read with fetch: an EventSource cannot send the key.
import { Refused, ask } from "./session.js";

const FIRST_WAIT_S = 0.5;
const LONGEST_WAIT_S = 8;
const SILENT_S = 15;

// Yields the events of a body: { name, id, data }.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) {
        return;
      }
      text += value;
      let end = text.indexOf("\n\n");
      while (end >= 0) {
        const event = { name: "message", id: null, data: "" };
        for (const line of text.slice(0, end).split("\n")) {
          const [field, rest] = [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1)];
          const content = rest.startsWith(" ") ? rest.slice(1) : rest;
          if (field === "event") event.name = content;
          if (field === "id") event.id = content;
          if (field === "data") event.data += event.data ? `\n${content}` : content;
        }
        text = text.slice(end + 2);
        if (event.data) {
          yield event;
        }
        end = text.indexOf("\n\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The stream of looks. Calls `onLook` with each look, and `onState` with connecting, live,
// reconnecting, paused or refused, and with the text of the server.
export class Watch {
  constructor(onLook, onState) {
    this.onLook = onLook;
    this.onState = onState;
    this.since = "0";
    this.aborter = null;
  }

  // Starts again, without any known rows.
  restart() {
    this.since = "0";
    this.stop();
    this.onState("connecting");
    this.run(new AbortController());
  }

  stop() {
    this.aborter?.abort();
    this.aborter = null;
  }

  resume() {
    if (!this.aborter) {
      this.run(new AbortController());
    }
  }

  async run(aborter) {
    this.aborter = aborter;
    let failures = 0;
    while (!aborter.signal.aborted) {
      let waitS = 0;
      try {
        await this.read(aborter, () => {
          failures = 0;
        });
        failures += 1; // reset by the first event of the next stream
        waitS = failures > 1 ? FIRST_WAIT_S : 0;
      } catch (error) {
        if (aborter.signal.aborted) {
          return;
        }
        if (error instanceof Refused && [401, 403].includes(error.status)) {
          this.aborter = null;
          this.onState("refused", error.message);
          return;
        }
        failures += 1;
        this.onState("reconnecting", error instanceof Refused ? error.message : "");
        waitS = Math.min(FIRST_WAIT_S * 2 ** (failures - 1), LONGEST_WAIT_S);
        waitS = Math.max(error.retryAfterS || 0, waitS * (0.75 + Math.random() / 2));
      }
      await new Promise((done) => setTimeout(done, 1000 * waitS));
    }
  }

  // Reads one stream to its end. Ends a stream that is silent for too long.
  async read(aborter, onEvent) {
    const own = new AbortController();
    const stop = () => own.abort();
    aborter.signal.addEventListener("abort", stop);
    let silent = setTimeout(stop, 1000 * SILENT_S);
    try {
      const path = `api/v1/live?since=${encodeURIComponent(this.since)}`;
      const answer = await ask(path, { signal: own.signal });
      for await (const event of events(answer.body)) {
        clearTimeout(silent);
        silent = setTimeout(stop, 1000 * SILENT_S);
        if (event.name !== "look" || aborter.signal.aborted) {
          continue;
        }
        onEvent();
        this.since = event.id ?? this.since;
        this.onState("live");
        this.onLook(JSON.parse(event.data));
      }
    } finally {
      clearTimeout(silent);
      aborter.signal.removeEventListener("abort", stop);
    }
  }
}
