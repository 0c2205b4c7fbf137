// Chats with a base model or a checkpoint over several turns, and shows tokens as they arrive.
import { readAnswer, requestOf } from "./conversation.js";
import { byId, make, part, say } from "./dom.js";
import * as names from "./models.js";
import { change, here } from "./route.js";
import { Refused, ask } from "./session.js";
import { events } from "./stream.js";

let aborter = null;
let models = [];
let listed = "";
let turns = [];
let isBusy = false;

const modelOf = (id) => models.find((each) => each.id === id) ?? null;
const isChat = () => byId("play-kind").value === "chat";

function showChoice() {
  const chosen = modelOf(byId("play-model").value);
  byId("play-base").disabled = !chosen?.parent;
  byId("play-system-row").hidden = !isChat();
  byId("play-send").disabled = isBusy || !chosen;
}

const missing = (id) =>
  id.startsWith("tinker://")
    ? `${id} is not one of your checkpoints: it belongs to another tenant, or it is deleted. Select a model.`
    : `No worker serves ${id}. Select a model.`;

// Selects the model of the address. If it is not listed, none is selected: no other may answer for it.
export function showPlayground(query) {
  const isMissing = Boolean(query.model && listed && !modelOf(query.model));
  if (isMissing) {
    byId("play-model").selectedIndex = -1;
  } else if (query.model) {
    byId("play-model").value = query.model;
  }
  say(byId("play-problem"), isMissing ? missing(query.model) : "");
  showChoice();
}

// Refills the list of models and keeps the selection.
export async function listModels() {
  let found;
  try {
    found = await names.modelsToSample();
  } catch (error) {
    say(byId("play-note"), error instanceof Refused ? error.message : "");
    return;
  }
  if (JSON.stringify(found) === listed) {
    return;
  }
  listed = JSON.stringify(found);
  models = found;
  const list = byId("play-model");
  const chosen = list.value;
  const group = (label, of) =>
    make("optgroup", { label }, ...of.map((each) => make("option", { value: each.id, title: each.id }, each.label)));
  const checkpoints = models.filter((each) => each.parent);
  list.replaceChildren(group("base models", models.filter((each) => !each.parent)));
  if (checkpoints.length) {
    list.append(group("your checkpoints, newest first", checkpoints));
  }
  if (modelOf(chosen)) {
    list.value = chosen;
  }
  showPlayground(here().view === "playground" ? here().query : {});
}

export function forgetModels() {
  names.forgetModels();
  models = [];
  listed = "";
  byId("play-model").replaceChildren();
  begin();
}

function begin() {
  aborter?.abort();
  turns = [];
  byId("play-log").replaceChildren();
  byId("play-log").hidden = true;
  say(byId("play-state"), "");
}

// --- a turn ---------------------------------------------------------------------------------------

function asked() {
  const number = (name) => Number(byId(`play-${name}`).value);
  return {
    isChat: isChat(),
    system: byId("play-system").value.trim(),
    maxTokens: number("tokens"),
    temperature: number("temperature"),
    topP: number("top-p"),
  };
}

function addTurn(user, models) {
  const boxes = models.map(([who, model]) =>
    make(
      "div",
      { class: `reply ${who}` },
      make("h3", {}, model.label),
      make("pre", { class: "answer" }, make("span", { class: "drawn" })),
      make("p", { class: "quiet reply-state" }, "waiting"),
    ),
  );
  byId("play-log").append(
    make("div", { class: "turn" }, make("p", { class: "said" }, make("span", { class: "sr" }, "You: "), user), make("div", { class: "replies" }, ...boxes)),
  );
  byId("play-log").hidden = false;
  return boxes;
}

async function answer(box, turn, who, settings, signal) {
  const state = part(box, "reply-state");
  const drawn = part(box, "drawn");
  const startedS = performance.now() / 1000;
  const headers = { "Content-Type": "application/json" };
  try {
    const [path, body] = requestOf(turns, who, settings);
    const stream = await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    const { tokens, reason } = await readAnswer(events(stream.body), (text) => {
      drawn.append(text);
      say(state, "sampling");
    });
    const tookS = performance.now() / 1000 - startedS;
    turn.answers[who] = drawn.textContent;
    say(state, `${tokens} tokens in ${tookS.toFixed(1)} s${reason ? `, ended by ${reason}` : ""}`);
    return true;
  } catch (error) {
    const text = error instanceof TypeError ? "the server cannot be reached" : error.message;
    say(state, signal.aborted ? "stopped" : text);
    return false;
  }
}

async function send() {
  const own = (aborter = new AbortController());
  const chosen = modelOf(byId("play-model").value);
  if (!chosen) {
    return;
  }
  const settings = asked();
  const turn = { user: byId("play-prompt").value, answers: {} };
  turns.push(turn);
  const base = chosen.parent && byId("play-base").checked ? { id: chosen.parent, label: chosen.parent } : null;
  const asks = base ? [["chosen", chosen], ["base", base]] : [["chosen", chosen]];
  const boxes = addTurn(turn.user, asks);
  busy(true);
  say(byId("play-state"), "sampling");
  const done = await Promise.all(
    asks.map(([who, model], index) => answer(boxes[index], turn, who, { ...settings, model: model.id }, own.signal)),
  );
  if (aborter !== own || own.signal.aborted) {
    if (aborter === own) {
      busy(false);
      say(byId("play-state"), turns.length ? "stopped" : "");
    }
    return;
  }
  busy(false);
  say(byId("play-state"), done.every(Boolean) ? "done" : "no answer");
  if (done.every(Boolean) && settings.isChat) {
    byId("play-prompt").value = "";
  }
}

function busy(isNow) {
  isBusy = isNow;
  byId("play-stop").disabled = !isBusy;
  showChoice();
}

export function installPlayground() {
  byId("play").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!byId("play-send").disabled) {
      send();
    }
  });
  byId("play-stop").addEventListener("click", () => aborter?.abort());
  byId("play-new").addEventListener("click", begin);
  byId("play-kind").addEventListener("change", () => {
    begin();
    showChoice();
  });
  byId("play-model").addEventListener("change", (event) => change({ model: event.target.value }));
  byId("play-model").addEventListener("focus", listModels);
  byId("play-prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      byId("play").requestSubmit();
    }
  });
}
