// Runs as the API returns them. The dashboard's own routes show all tenants' runs to an admin key.
import { rowsFrom } from "./series.js";
import { askJson, sendJson } from "./session.js";

const LIVE = "api/v1/live/runs";

export const shortId = (id) => id.replace(/^s-([0-9a-f]{6})[0-9a-f]*:train:/, "$1…/");
export const nameOf = (run) => run.name || shortId(run.training_run_id);
export const tagsOf = (run) =>
  (run.user_metadata?.tags ?? "").split(",").map((tag) => tag.trim()).filter(Boolean);
export const isArchived = (run) => run.user_metadata?.archived === "true";

// The values of `tuneserve train` and of other clients that write them; {} if there are none.
export function configOf(run) {
  try {
    const found = JSON.parse(run.user_metadata?.config ?? "{}");
    return found && typeof found === "object" && !Array.isArray(found) ? found : {};
  } catch {
    return {}; // a client may write any text
  }
}

const asked = (query) =>
  new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined));

export const search = (query, signal) => askJson(`${LIVE}?${asked(query)}`, { signal });
export const searchOwn = (query) => askJson(`api/v1/training_runs/search?${asked(query)}`);

// { run, rows, events, checkpoints }
export async function pageOf(id) {
  const { run, points, events, checkpoints } = await askJson(`${LIVE}/${encodeURIComponent(id)}`);
  return { run, rows: rowsFrom(points), events, checkpoints };
}

// Sets entries of the run's metadata; null removes one.
export const update = (id, metadata) =>
  sendJson("PATCH", `api/v1/training_runs/${encodeURIComponent(id)}`, { user_metadata: metadata });
