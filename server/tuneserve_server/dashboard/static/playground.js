// Samples from a base model or one of the caller's checkpoints, and shows tokens as they arrive.
import { byId, make, say } from "./dom.js";
import { Refused, ask } from "./session.js";
import { events } from "./stream.js";

let aborter = null;
let listed = "";

const shortPath = (path) => {
  const [, session, run, name] = path.match(/^tinker:\/\/s-([0-9a-f]{6})[0-9a-f]*:train:(\d+)\/\w+\/(.+)$/) ?? [];
  return name ? `${name} (${session}…/${run})` : path;
};

// Refills the list of models and keeps the selection.
export async function listModels() {
  let models;
  try {
    models = (await (await ask("v1/models")).json()).data;
  } catch (error) {
    say(byId("play-note"), error instanceof Refused ? error.message : "");
    return;
  }
  const ids = models.map((each) => each.id);
  if (JSON.stringify(ids) === listed) {
    return;
  }
  listed = JSON.stringify(ids);
  const list = byId("play-model");
  const chosen = list.value;
  const group = (label, of) =>
    make("optgroup", { label }, ...of.map((id) => make("option", { value: id, title: id }, shortPath(id))));
  const bases = ids.filter((id) => !id.startsWith("tinker://"));
  const checkpoints = ids.filter((id) => id.startsWith("tinker://"));
  list.replaceChildren(group("base models", bases));
  if (checkpoints.length) {
    list.append(group("your checkpoints, newest first", checkpoints));
  }
  if (ids.includes(chosen)) {
    list.value = chosen;
  }
}

export function forgetModels() {
  aborter?.abort();
  listed = "";
  byId("play-model").replaceChildren();
  byId("play-answer").hidden = true;
  say(byId("play-state"), "");
}

const request = () => {
  const prompt = byId("play-prompt").value;
  const isChat = byId("play-kind").value === "chat";
  const asked = isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  const body = {
    ...asked,
    model: byId("play-model").value,
    max_tokens: Number(byId("play-tokens").value),
    temperature: Number(byId("play-temperature").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  return [isChat ? "v1/chat/completions" : "v1/completions", body];
};

async function send() {
  const own = (aborter = new AbortController());
  const answer = byId("play-answer");
  const [path, body] = request();
  answer.hidden = false;
  answer.replaceChildren();
  if (path === "v1/completions") {
    answer.append(make("span", { class: "quiet" }, body.prompt));
  }
  const drawn = answer.appendChild(make("span", { class: "drawn" }));
  const startedS = performance.now() / 1000;
  let usage = null;
  let reason = "";
  busy(true);
  say(byId("play-state"), "waiting");
  try {
    const headers = { "Content-Type": "application/json" };
    const stream = await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal: own.signal });
    for await (const event of events(stream.body)) {
      if (event.data === "[DONE]") {
        break;
      }
      const piece = JSON.parse(event.data);
      if (piece.error) {
        throw new Error(piece.error.message);
      }
      usage = piece.usage ?? usage;
      const choice = piece.choices[0];
      drawn.append(choice?.text ?? choice?.delta?.content ?? "");
      reason = choice?.finish_reason ?? reason;
      say(byId("play-state"), "sampling");
    }
    const tokens = usage?.completion_tokens ?? 0;
    const tookS = performance.now() / 1000 - startedS;
    say(byId("play-state"), `${tokens} tokens in ${tookS.toFixed(1)} s${reason ? `, ended by ${reason}` : ""}`);
  } catch (error) {
    if (own.signal.aborted) {
      say(byId("play-state"), "stopped");
    } else {
      say(byId("play-state"), error instanceof TypeError ? "the server cannot be reached" : error.message);
    }
  } finally {
    if (aborter === own) {
      busy(false);
    }
  }
}

function busy(isBusy) {
  byId("play-send").disabled = isBusy;
  byId("play-stop").disabled = !isBusy;
}

export function installPlayground() {
  byId("play").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!byId("play-send").disabled) {
      send();
    }
  });
  byId("play-stop").addEventListener("click", () => aborter?.abort());
  byId("play-model").addEventListener("focus", listModels);
  byId("play-prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      byId("play").requestSubmit();
    }
  });
}
