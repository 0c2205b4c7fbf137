// The parts of a run's page: answers, configuration, checkpoints, samples and events.
import { isDone, isGood, whatCost } from "./answers.js";
import { byId, keyed, make, part, say } from "./dom.js";
import { copyable } from "./download.js";
import { bytes, count, moment, short } from "./format.js";
import { format } from "./route.js";
import { configOf, shortId } from "./run_data.js";
import { serverUrl } from "./session.js";

const QUESTIONS = ["Is it good?", "When is it done?", "What did it cost?"];
const FIRST = ["data", "rows", "held_out_rows", "seed", "learning_rate", "epochs", "batch_size", "steps"];
const KINDS = { training: "training state", sampler: "sampler weights", external: "export" };

// --- answers --------------------------------------------------------------------------------------

const makeAnswer = (question) =>
  make(
    "li",
    {},
    make("h3", {}, question),
    make("strong", { class: "answer-number" }),
    make("span", { class: "answer-word" }),
    make("progress", { class: "answer-share", max: "1" }),
    make("p", { class: "answer-note quiet" }),
  );

export function showAnswers(run, rows, events, nowS) {
  const verdict = events.findLast((event) => event.kind === "verdict")?.data ?? null;
  const [good, done, cost] = [isGood(run, rows, verdict), isDone(run, rows, nowS), whatCost(run)];
  // The word stands first where it is the answer.
  const told = [
    { ...good, number: good.word, word: `loss ${good.number}` },
    { ...done, tone: "" },
    { ...cost, tone: "" },
  ];
  keyed(byId("answers"), QUESTIONS, (each) => each, makeAnswer, (element, question) => {
    const { number, word, note, tone, share } = told[QUESTIONS.indexOf(question)];
    say(part(element, "answer-number"), number);
    part(element, "answer-number").dataset.tone = tone;
    say(part(element, "answer-word"), word);
    say(part(element, "answer-note"), note);
    const bar = part(element, "answer-share");
    bar.hidden = share === null || share === undefined;
    bar.value = share ?? 0;
    bar.setAttribute("aria-label", "Share of the steps that are done");
  });
}

// --- configuration --------------------------------------------------------------------------------

const words = (name) => {
  const text = name.replaceAll("_", " ");
  return text[0].toUpperCase() + text.slice(1);
};

function written(value) {
  if (value === null || value === undefined || value === "") {
    return "–";
  }
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

export function showConfig(run) {
  const config = configOf(run);
  const names = [...FIRST.filter((name) => name in config), ...Object.keys(config).filter((name) => !FIRST.includes(name))];
  const facts = [
    ["Base model", run.base_model],
    ["Adapter", `${run.adapter}, rank ${run.lora_rank ?? "–"}`],
    ...names.map((name) => [words(name), written(config[name])]),
    ["Created", run.created ? moment(run.created) : "–"],
  ];
  const create = ([title]) => make("div", {}, make("dt", {}, title), make("dd", {}));
  keyed(byId("run-config"), facts, ([title]) => title, create, (element, [, value]) => say(element.querySelector("dd"), value));
  byId("run-config-none").hidden = names.length > 0;
}

// --- checkpoints ----------------------------------------------------------------------------------

function makeCheckpoint(checkpoint) {
  const path = checkpoint.tinker_path;
  const name = path.slice(path.lastIndexOf("/") + 1);
  const isExport = checkpoint.checkpoint_type === "external";
  const open = make("a", { href: format("playground", "", { model: path }), "aria-label": `Open ${name} in the playground` }, "Playground");
  const parts = [KINDS[checkpoint.checkpoint_type], moment(checkpoint.time)];
  if (checkpoint.size_bytes !== null && checkpoint.size_bytes !== undefined) {
    parts.push(bytes(checkpoint.size_bytes));
  }
  if (checkpoint.expires_at) {
    parts.push(`expires ${moment(checkpoint.expires_at)}`);
  }
  return make(
    "li",
    {},
    make("p", { class: "checkpoint-head" }, make("strong", {}, name), ...(isExport ? [] : [open])),
    make("p", { class: "quiet" }, parts.join(" · ")),
    copyable(`tuneserve checkpoints export ${path} ./${name} --url ${serverUrl()}`),
  );
}

export function showCheckpoints(checkpoints) {
  byId("run-checkpoints-none").hidden = checkpoints.length > 0;
  const keyOf = (each) => JSON.stringify([each.tinker_path, each.time, each.size_bytes, each.expires_at]);
  keyed(byId("run-checkpoints"), checkpoints, keyOf, makeCheckpoint, () => {});
}

// --- samples and events ---------------------------------------------------------------------------

// The samples by prompt, in the order in which the prompts appeared; the newest step first.
export function byPrompt(events) {
  const prompts = new Map();
  for (const { kind, step, data } of events) {
    for (const each of kind === "samples" && Array.isArray(data?.samples) ? data.samples : []) {
      const prompt = String(each.prompt ?? "");
      prompts.set(prompt, [{ step, completion: String(each.completion ?? "") }, ...(prompts.get(prompt) ?? [])]);
    }
  }
  return [...prompts].map(([prompt, samples]) => ({ prompt, samples }));
}

const makeSample = ({ step, completion }) =>
  make("div", { class: "sample" }, make("dt", {}, `step ${count(step ?? 0)}`), make("dd", {}, completion));

export function showSamples(events) {
  const found = byPrompt(events);
  byId("run-samples-none").hidden = found.length > 0;
  keyed(
    byId("run-samples"),
    found,
    ({ prompt }) => prompt,
    ({ prompt }) => make("li", {}, make("h3", {}, prompt), make("dl", { class: "samples" })),
    (element, { samples }) => keyed(part(element, "samples"), samples, ({ step, completion }) => `${step} ${completion}`, makeSample, () => {}),
  );
}

function textOf({ kind, data }) {
  if (kind === "samples") {
    return `${short(data?.samples?.length ?? 0)} samples`;
  }
  return String(data?.verdict ?? data?.text ?? data?.note ?? JSON.stringify(data));
}

export function showEvents(run, events) {
  const id = run.training_run_id;
  const created = { kind: "created", time: run.created, step: null, data: { text: shortId(id) }, event_id: "" };
  const all = [created, ...events].reverse();
  const create = (event) =>
    make(
      "li",
      {},
      make("span", { class: "quiet" }, [event.time ? moment(event.time) : "", event.step === null ? "" : `step ${count(event.step ?? 0)}`].filter(Boolean).join(" · ")),
      make("span", {}, `${event.kind}: ${textOf(event)}`),
    );
  keyed(byId("run-events"), all, (event) => `${id} ${event.event_id}`, create, () => {});
}
