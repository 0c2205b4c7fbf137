// A run's curve as rows, one for each optimizer step, from the points that the API returns.

export const COLUMNS = [
  ["loss", "Loss"],
  ["held_out_loss", "Held-out loss"],
  ["learning_rate", "Learning rate"],
  ["grad_norm", "Gradient norm"],
  ["tokens_per_s", "Tokens per second"],
  ["step_time_s", "Step time (s)"],
];
const FEWEST_KEPT = 1024; // a kind of requests of which the API leaves some out keeps more than these
const THINNED = 1.5; // at least each second one is left out then

const mean = (group) => (group.count ? group.sum / group.count : null);
const nothing = () => ({ sum: 0, count: 0 });

// A point without weights counts by its tokens, unless it has no loss either.
function add(group, point) {
  group.sum += point.loss_sum ?? 0;
  group.count += point.weight || (point.loss_sum ? (point.tokens ?? 0) : 0);
}

const isKnown = (value) => value !== null && value !== undefined;

// Whether a row is of an optimizer step; the evaluations before the first step are a row too.
export const isStep = (row) => isKnown(row.loss) || isKnown(row.learning_rate);

// The tokens of a mean step of a curve that the API has thinned out; null if no gradient is missing.
// Of each kind of request, the API then keeps each n-th, with an n of its own. The number of missing
// ones follows from the numbers of the steps, and from `seq_id`, which counts all requests of the run.
function meanStepTokens(points) {
  const of = (kind) => points.filter((point) => point.kind === kind);
  const [kept, gradients, forwards] = [of("optim_step"), of("forward_backward"), of("forward")];
  let steps = kept.length;
  kept.slice(1).forEach((point, index) => {
    const missing = point.step - kept[index].step - 1;
    // A step that was loaded from a checkpoint leaves a gap without requests.
    steps += missing > 0 && point.seq_id - kept[index].seq_id > missing ? missing : 0;
  });
  if (steps === kept.length && gradients.length <= FEWEST_KEPT) {
    return null;
  }
  const others = points.at(-1).seq_id - points[0].seq_id + 1 - steps;
  const isEach = forwards.length <= FEWEST_KEPT; // no evaluation is missing
  const all = isEach ? others - forwards.length : (others * gradients.length) / (gradients.length + forwards.length);
  if (!(all >= THINNED * gradients.length)) {
    return null;
  }
  const tokens = gradients.reduce((sum, point) => sum + (point.tokens ?? 0), 0);
  return ((tokens / gradients.length) * all) / steps;
}

function fillTokens(rows, points) {
  const own = rows.filter(isStep);
  const each = own.length ? meanStepTokens(points) : null;
  for (const row of each === null ? [] : own) {
    row.tokens = each * (row.step - own[0].step + 1);
  }
}

function fillRates(rows) {
  rows.forEach((row, index) => {
    const before = index && isStep(rows[index - 1]) ? rows[index - 1] : null;
    const seconds = before ? row.time_s - before.time_s : 0;
    const steps = before ? row.step - before.step : 0;
    row.step_time_s = seconds > 0 && steps > 0 ? seconds / steps : null;
    row.tokens_per_s = seconds > 0 ? (row.tokens - before.tokens) / seconds : null;
  });
}

// Rows from points in the order of their requests. A `forward` request between two optimizer steps
// measures the held-out loss after the earlier step. `tokens` are those of the gradients so far.
export function rowsFrom(points) {
  const rows = [];
  let trained = nothing();
  let heldOut = nothing();
  let tokens = 0;
  let startS = null;
  // A run that resumes does not begin with step 1.
  const beginning = Math.max((points.find((point) => point.kind === "optim_step")?.step ?? 1) - 1, 0);
  const endHeldOut = () => {
    const value = mean(heldOut);
    if (value !== null && rows.length) {
      rows.at(-1).held_out_loss = value;
    } else if (value !== null) {
      rows.push({ step: beginning, time_s: startS, tokens: 0, loss: null, held_out_loss: value, learning_rate: null, grad_norm: null });
    }
    heldOut = nothing();
  };
  for (const point of points) {
    const timeS = Date.parse(point.time) / 1000;
    startS ??= timeS;
    if (point.kind === "forward_backward") {
      add(trained, point);
      tokens += point.tokens ?? 0;
    } else if (point.kind === "forward") {
      add(heldOut, point);
    } else if (point.kind === "optim_step") {
      endHeldOut();
      // The step counts from 1 again when the optimizer's state was loaded or reset.
      const step = Math.max(point.step ?? 0, (rows.at(-1)?.step ?? 0) + 1);
      rows.push({
        step,
        time_s: timeS,
        tokens,
        loss: mean(trained),
        held_out_loss: null,
        learning_rate: point.learning_rate ?? null,
        grad_norm: point.grad_norm ?? null,
      });
      trained = nothing();
    }
  }
  endHeldOut();
  fillTokens(rows, points);
  fillRates(rows);
  return rows;
}

// The points [x, y] of a column; `axis` is step, tokens, or time in seconds since the first row.
export function pointsFrom(rows, column, axis) {
  const startS = rows[0]?.time_s ?? 0;
  const place = { step: (row) => row.step, tokens: (row) => row.tokens, time: (row) => row.time_s - startS };
  const points = [];
  for (const row of rows) {
    const x = place[axis](row);
    if (row[column] !== null && row[column] !== undefined && !(points.length && x <= points.at(-1)[0])) {
      points.push([x, row[column]]);
    }
  }
  return points;
}

// The exponential moving average with the weight `amount` on the past, from 0 to below 1. As in
// Adam (Kingma and Ba 2015, section 3), it is divided by the sum of its weights.
export function smoothed(points, amount) {
  if (!amount) {
    return points;
  }
  let sum = 0;
  let weights = 0;
  return points.map(([x, y]) => {
    sum = amount * sum + (1 - amount) * y;
    weights = amount * weights + (1 - amount);
    return [x, sum / weights];
  });
}

const cell = (value) => {
  const text = value === null || value === undefined ? "" : String(value);
  // A name that starts like a formula would run in a spreadsheet.
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};

const SAVED = ["step", "time", "tokens", ...COLUMNS.map(([name]) => name)];

// The CSV text (RFC 4180) of the rows of several runs: [[name, rows], …].
export function csvOf(runs) {
  const lines = [["run", ...SAVED].join(",")];
  for (const [name, rows] of runs) {
    for (const row of rows) {
      const time = row.time_s === null ? "" : new Date(1000 * row.time_s).toISOString();
      lines.push([name, ...SAVED.map((column) => (column === "time" ? time : row[column]))].map(cell).join(","));
    }
  }
  return `${lines.join("\r\n")}\r\n`;
}
