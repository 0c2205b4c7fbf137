// The look of each run's lines: ten colours, and dashes when there are more runs.

export const COLOURS = 10;
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];

export const lookAt = (index) => ({
  colour: `--line-${(index % COLOURS) + 1}`,
  dash: DASHES[Math.floor(index / COLOURS) % DASHES.length],
});

const known = new Map();

export function lookOf(id) {
  if (!known.has(id)) {
    known.set(id, lookAt(known.size));
  }
  return known.get(id);
}

export const forgetLooks = () => known.clear();
