// The horizontal axes of charts: how a place on them is written and said.
import { count, duration, short } from "./format.js";

export const byStep = {
  name: "step",
  tick: (value) => (Number.isInteger(value) ? count(value) : ""),
  say: (value) => `step ${count(value)}`,
};
const byTokens = { name: "tokens", tick: (value) => short(value), say: (value) => `${short(value)} tokens` };
const byTime = { name: "time", tick: (value) => duration(value), say: (value) => `after ${duration(value)}` };

export const AXES = { step: byStep, tokens: byTokens, time: byTime };
