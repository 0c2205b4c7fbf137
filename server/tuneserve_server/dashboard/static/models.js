// The models to sample from: base models, and checkpoints with the name of their run.
import { nameOf, searchOwn, shortId } from "./run_data.js";
import { askJson } from "./session.js";

const PAGE = 1000;
const PATH = /^tinker:\/\/(.+?)\/(weights|sampler_weights)\/(.+)$/;

const names = new Map(); // of runs
let asked = new Set(); // runs without a known name that were looked up

export function forgetModels() {
  names.clear();
  asked = new Set();
}

// Reads names of runs until those of `wanted` are known or all runs have been read.
async function nameRuns(wanted) {
  const missing = wanted.filter((id) => !names.has(id) && !asked.has(id));
  if (!missing.length) {
    return;
  }
  for (let offset = 0, total = 1; offset < total; offset += PAGE) {
    const told = await searchOwn({ archived: "all", limit: PAGE, offset });
    total = told.cursor.total_count;
    told.training_runs.forEach((run) => names.set(run.training_run_id, nameOf(run)));
    if (missing.every((id) => names.has(id))) {
      break;
    }
  }
  asked = new Set([...asked, ...missing]);
}

// [{ id, label, parent }]: `parent` is the base model of a checkpoint, null for a base model.
export async function modelsToSample() {
  const told = (await askJson("v1/models")).data;
  const runs = told.map((each) => each.id.match(PATH)?.[1]).filter(Boolean);
  await nameRuns([...new Set(runs)]);
  return told.map(({ id, parent }) => {
    const [, run, kind, name] = id.match(PATH) ?? [];
    const state = kind === "weights" ? " (training state)" : "";
    return { id, label: run ? `${names.get(run) ?? shortId(run)} / ${name}${state}` : id, parent: run ? parent : null };
  });
}
