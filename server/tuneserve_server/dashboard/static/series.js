// A run's curve as rows, one for each optimizer step, from the points that the API returns.

export const COLUMNS = [
  ["loss", "Loss"],
  ["held_out_loss", "Held-out loss"],
  ["learning_rate", "Learning rate"],
  ["grad_norm", "Gradient norm"],
  ["tokens_per_s", "Tokens per second"],
  ["step_time_s", "Step time (s)"],
];

const mean = (group) => {
  const of = group.weight || group.tokens;
  return of ? group.sum / of : null;
};
const nothing = () => ({ sum: 0, weight: 0, tokens: 0 });

function add(group, point) {
  group.sum += point.loss_sum ?? 0;
  group.weight += point.weight ?? 0;
  group.tokens += point.tokens ?? 0;
}

// Cumulative tokens. The API thins out long curves; the run's total then corrects the scale.
function fillTokens(rows, total) {
  const isThin = rows.some((row, index) => index > 0 && row.step - rows[index - 1].step > 1);
  const last = rows.at(-1)?.tokens;
  const scale = isThin && total && last ? total / last : 1;
  for (const row of rows) {
    row.tokens *= scale;
  }
}

function fillRates(rows) {
  rows.forEach((row, index) => {
    const before = rows[index - 1];
    const seconds = before ? row.time_s - before.time_s : 0;
    const steps = before ? row.step - before.step : 0;
    row.step_time_s = seconds > 0 && steps > 0 ? seconds / steps : null;
    row.tokens_per_s = seconds > 0 ? (row.tokens - before.tokens) / seconds : null;
  });
}

// Rows from points in the order of their requests. `total` is the run's number of trained tokens.
// A `forward` request between two optimizer steps measures the held-out loss after the earlier step.
export function rowsFrom(points, total = null) {
  const rows = [];
  let trained = nothing();
  let heldOut = nothing();
  let tokens = 0;
  let startS = null;
  const endHeldOut = () => {
    const value = mean(heldOut);
    if (value !== null && rows.length) {
      rows.at(-1).held_out_loss = value;
    } else if (value !== null) {
      rows.push({ step: 0, time_s: startS, tokens: 0, loss: null, held_out_loss: value, learning_rate: null, grad_norm: null });
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
  fillTokens(rows, total);
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
