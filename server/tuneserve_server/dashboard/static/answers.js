// The three answers at the top of a run's page: is it good, when is it done, what did it cost.
import { count, duration, loss, short } from "./format.js";
import { isStep } from "./series.js";

const FLAT = 0.01; // a smaller relative change is called flat, as by tuneserve train
const RECENT = 20; // steps whose rate gives the time that is left
const STALLED_S = 60; // a run without a step for this long, and for 20 steps' time, is not timed
const GONE = new Set(["finished", "stopped", "failed", "diverged"]);

export const isOver = (run) => GONE.has(run.state);

const valuesOf = (rows, column) =>
  rows.filter((row) => row[column] !== null && row[column] !== undefined).map((row) => [row.step, row[column]]);
const meanOf = (points) => points.reduce((sum, [, value]) => sum + value, 0) / points.length;

// First, last and best of a column; the noise of training losses is averaged over a tenth of the run.
function trend(points, isNoisy) {
  const size = isNoisy ? Math.max(1, Math.floor(points.length / 10)) : 1;
  const best = points.reduce((least, each) => (each[1] < least[1] ? each : least));
  return {
    first: meanOf(points.slice(0, size)),
    last: meanOf(points.slice(-size)),
    best: best[1],
    bestStep: best[0],
  };
}

// As the verdict of tuneserve train: a loss that was never below its start does not overfit.
function judged({ first, last, best, bestStep }, isHeldOut) {
  const lowest = isHeldOut ? best : last;
  if (lowest >= first * (1 - FLAT)) {
    return last > first * (1 + FLAT) ? ["Getting worse", "bad"] : ["Flat", "warn"];
  }
  if (isHeldOut && last > best * (1 + FLAT)) {
    return [`Overfitting since step ${count(bestStep)}`, "warn"];
  }
  return ["Improving", "good"];
}

const asPercent = ({ first, last }) => {
  if (!first) {
    return "";
  }
  const change = Math.round((100 * (last - first)) / Math.abs(first));
  return ` (${change > 0 ? "+" : change < 0 ? "−" : "±"}${Math.abs(change)} %)`;
};

// { word, tone, number, note }
export function isGood(run, rows, verdict) {
  if (run.state === "diverged") {
    return { word: "Diverged", tone: "bad", number: loss(run.loss), note: verdict?.verdict ?? "the loss is no longer finite, or rose without bound; train again with a lower learning rate" };
  }
  const heldOut = valuesOf(rows, "held_out_loss");
  const trained = valuesOf(rows, "loss");
  const isHeldOut = heldOut.length > 0;
  const points = isHeldOut ? heldOut : trained;
  if (!points.length) {
    return { word: "Not known yet", tone: "quiet", number: "–", note: "no loss has been measured" };
  }
  const found = trend(points, !isHeldOut);
  const [word, tone] = points.length > 1 ? judged(found, isHeldOut) : ["First measurement", "quiet"];
  const kind = isHeldOut ? "held-out loss" : "training loss";
  const facts = [`${kind} ${loss(found.first)} → ${loss(found.last)}${asPercent(found)}`];
  if (isHeldOut) {
    facts.push(`best ${loss(found.best)} at step ${count(found.bestStep)}`);
  } else {
    facts.push("no held-out data: train with --eval-split to see how it generalises");
  }
  return { word, tone, number: loss(found.last), note: verdict?.verdict ?? facts.join(" · ") };
}

// The newest step, and the seconds of a recent one: null before the second step.
function rateOf(rows) {
  const recent = rows.filter(isStep).slice(-RECENT);
  const last = recent.at(-1);
  const stepS = recent.length < 2 ? null : (last.time_s - recent[0].time_s) / (last.step - recent[0].step);
  return { last, stepS };
}

// Seconds since the newest step if they are too many for a run at work, else 0.
function stalledS(rows, nowS) {
  const { last, stepS } = rateOf(rows);
  const sinceS = last ? Math.max(nowS - last.time_s, 0) : 0;
  return sinceS > Math.max(STALLED_S, RECENT * (stepS ?? 0)) ? sinceS : 0;
}

// Seconds until the last step, from the rate of the recent steps; null if unknown or stalled.
export function leftS(rows, steps, nowS) {
  const { last, stepS } = rateOf(rows);
  if (steps && last && last.step >= steps) {
    return 0;
  }
  if (!steps || stepS === null || stalledS(rows, nowS)) {
    return null;
  }
  return Math.max((steps - last.step) * stepS - Math.min(Math.max(nowS - last.time_s, 0), stepS), 0);
}

const clock = (unixS, nowS) => {
  const then = new Date(1000 * unixS);
  const isToday = then.toDateString() === new Date(1000 * nowS).toDateString();
  const time = then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return isToday ? time : `${then.toLocaleDateString([], { day: "numeric", month: "short" })}, ${time}`;
};

export function isDone(run, rows, nowS) {
  const last = rows.at(-1);
  const step = run.step ?? last?.step ?? 0;
  const of = run.steps ? `step ${count(step)} of ${count(run.steps)}` : `step ${count(step)}`;
  const took = run.duration_s ? ` · ${duration(run.duration_s)}` : "";
  if (isOver(run)) {
    const endS = last?.time_s ?? Date.parse(run.last_request_time) / 1000;
    return { word: run.state, number: clock(endS, nowS), note: `ended at ${of}${took}`, share: null };
  }
  const left = leftS(rows, run.steps, nowS);
  const share = run.steps ? Math.min(step / run.steps, 1) : null;
  if (left === null) {
    const quietS = stalledS(rows, nowS);
    const quiet = quietS ? ` · no step for ${duration(quietS)}` : "";
    const why = run.steps ? quiet : ` · the client did not say how many steps it will take${quiet}`;
    return { word: run.state, number: "not known", note: `${of}${took}${why}`, share };
  }
  return { word: run.state, number: `in ${duration(left)}`, note: `about ${clock(nowS + left, nowS)} · ${of}${took}`, share };
}

export function whatCost(run) {
  const rate = run.device_s > 0 && run.tokens ? ` · ${short(run.tokens / run.device_s)} tokens per device second` : "";
  const known = run.device_s !== null && run.device_s !== undefined;
  return {
    number: known ? duration(run.device_s) : "–",
    word: "of device time, without samples",
    note: `${run.tokens === null || run.tokens === undefined ? "–" : short(run.tokens)} tokens in gradients and forward passes${rate}`,
  };
}
