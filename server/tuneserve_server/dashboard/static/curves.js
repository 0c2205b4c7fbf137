// The known rows of each run's curve: [x, time, loss, learning rate, gradient norm].

const MOST_ROWS = 2048;

const curves = new Map();

export function forgetCurves() {
  curves.clear();
}

// Adds new rows and ignores known ones.
export function addRows(told) {
  for (const [id, rows] of Object.entries(told)) {
    const known = curves.get(id) ?? [];
    const later = rows.filter((row) => !known.length || row[0] > known.at(-1)[0]);
    let all = known.concat(later);
    if (all.length > MOST_ROWS) {
      all = all.filter((_, index) => index % 2 === 0 || index === all.length - 1);
    }
    curves.set(id, all);
  }
}

export function keepOnly(ids) {
  for (const id of curves.keys()) {
    if (!ids.has(id)) {
      curves.delete(id);
    }
  }
}

export const rowsOf = (id) => curves.get(id) ?? [];

// The points of one column; rows without a value are left out.
export const pointsOf = (id, column) =>
  rowsOf(id).filter((row) => row[column] !== null).map((row) => [row[0], row[column]]);
