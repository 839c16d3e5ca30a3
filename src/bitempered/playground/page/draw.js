// Draws what the server computed: pictures of the nets, and line charts.

export const EDGE = 1.25; // the pictures show the square from -EDGE to EDGE, as settings.py says

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(`--${name}`).trim();
  return { classes: [get("class0"), get("class1"), get("class2")], back: get("plot"), line: get("text"), mark: get("mark") };
}

export function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

const rgb = (hex) => {
  const long = hex.length === 4 ? hex.replace(/[^#]/g, "$&$&") : hex;
  return [1, 3, 5].map((i) => parseInt(long.slice(i, i + 2), 16));
};

// A picture: shades by probability, the boundaries, the points, the cross.
export function picture(canvas, { surface, grid, classes, truth, points, marks, probe, palette }) {
  const scale = window.devicePixelRatio || 1;
  const size = Math.round(canvas.clientWidth * scale);
  if (!size) return;
  if (canvas.width !== size) canvas.width = canvas.height = size;
  const pen = canvas.getContext("2d");
  pen.fillStyle = palette.back;
  pen.fillRect(0, 0, size, size);
  pen.lineJoin = pen.lineCap = "round";
  if (surface) {
    pen.imageSmoothingQuality = "high";
    pen.drawImage(shades(surface, grid, classes, palette), 0, 0, size, size);
  }
  dots(pen, size, scale, points, marks, palette);
  if (surface) {
    const thin = Math.min(1, canvas.clientWidth / 400) * scale;
    if (truth) boundary(pen, size, grid, classes, truth, palette.line, 1.8 * thin, true);
    boundary(pen, size, grid, classes, surface, palette.back, 5.5 * thin);
    boundary(pen, size, grid, classes, surface, palette.line, 3 * thin);
  }
  if (probe) cross(pen, size, scale, probe, palette);
}

// One pixel for each cell: the colour of the likeliest class, the stronger the surer the net is.
let cells = null;
function shades(surface, grid, classes, palette) {
  if (!cells || cells.width !== grid) {
    cells = document.createElement("canvas");
    cells.width = cells.height = grid;
  }
  const pen = cells.getContext("2d");
  const image = pen.createImageData(grid, grid);
  const back = rgb(palette.back);
  const inks = palette.classes.map(rgb);
  for (let i = 0; i < grid * grid; i++) {
    let best = 0;
    for (let k = 1; k < classes; k++) if (surface[k * grid * grid + i] > surface[best * grid * grid + i]) best = k;
    const sure = Math.max(0, (surface[best * grid * grid + i] / 255 - 1 / classes) / (1 - 1 / classes));
    const strength = 0.12 + 0.45 * Math.sqrt(sure);
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = back[c] + strength * (inks[best][c] - back[c]);
    image.data[4 * i + 3] = 255;
  }
  pen.putImageData(image, 0, 0);
  return cells;
}

// Where a class stops being the likeliest: marching squares through the centres of the cells.
function boundary(pen, size, grid, classes, planes, colour, width, dashed = false) {
  const lead = (label, i) => {
    let other = 0;
    for (let k = 0; k < classes; k++) if (k !== label) other = Math.max(other, planes[k * grid * grid + i]);
    return planes[label * grid * grid + i] - other + 0.5;
  };
  const at = (k) => ((k + 0.5) / grid) * size;
  pen.strokeStyle = colour;
  pen.lineWidth = width;
  pen.beginPath();
  for (let label = 0; label < (classes === 2 ? 1 : classes); label++) {
    for (let y = 0; y + 1 < grid; y++) {
      for (let x = 0; x + 1 < grid; x++) {
        if (dashed && (x + y) % 2) continue; // the next cell that a line enters is one up, down, left or right
        const corners = [[x, y], [x + 1, y], [x + 1, y + 1], [x, y + 1]];
        const values = corners.map(([u, v]) => lead(label, v * grid + u));
        const ends = [];
        for (let side = 0; side < 4; side++) {
          const a = values[side], b = values[(side + 1) % 4];
          if (a > 0 === b > 0) continue;
          const [u, v] = corners[side], [p, q] = corners[(side + 1) % 4], part = a / (a - b);
          ends.push([at(u + part * (p - u)), at(v + part * (q - v))]);
        }
        for (let k = 0; k + 1 < ends.length; k += 2) {
          pen.moveTo(...ends[k]);
          pen.lineTo(...ends[k + 1]);
        }
      }
    }
  }
  pen.stroke();
}

export const toPixel = ([x, y], size) => [((x / EDGE + 1) / 2) * size, ((1 - y / EDGE) / 2) * size];
export const toPlace = ([x, y], size) => [(2 * x / size - 1) * EDGE, (1 - 2 * y / size) * EDGE];

// The points with the labels that the nets see: a circle, a square or a triangle; wrong ones on top, outlined.
function dots(pen, size, scale, points, marks, palette) {
  const radius = points.length > 300 ? Math.max(1.7 * scale, 0.0065 * size) : Math.max(3.5 * scale, 0.012 * size);
  const outline = Math.max(0.9 * scale, 0.0034 * size);
  for (const wrong of [false, true]) {
    for (const [x, y, clean, given] of points) {
      if ((clean !== given) !== wrong) continue;
      const marked = wrong && marks;
      const [u, v] = toPixel([x, y], size);
      pen.beginPath();
      shape(pen, given, u, v, marked ? radius * 1.12 : radius);
      pen.fillStyle = palette.classes[given];
      pen.fill();
      pen.strokeStyle = marked ? palette.mark : palette.back;
      pen.lineWidth = marked ? outline : outline / 2;
      pen.stroke();
    }
  }
}

function shape(pen, label, u, v, r) {
  if (label === 0) pen.arc(u, v, r, 0, 2 * Math.PI);
  else if (label === 1) pen.rect(u - 0.88 * r, v - 0.88 * r, 1.76 * r, 1.76 * r);
  else {
    pen.moveTo(u, v - 1.3 * r);
    pen.lineTo(u + 1.15 * r, v + 0.8 * r);
    pen.lineTo(u - 1.15 * r, v + 0.8 * r);
    pen.closePath();
  }
}

function cross(pen, size, scale, place, palette) {
  const [u, v] = toPixel(place, size);
  const [gap, reach] = [6 * scale, 14 * scale]; // open in the middle, so that a point there is seen
  for (const [colour, width] of [[palette.back, 5], [palette.mark, 2]]) {
    pen.strokeStyle = colour;
    pen.lineWidth = width * scale;
    pen.beginPath();
    for (const [p, q] of [[1, 0], [-1, 0], [0, 1], [0, -1]]) {
      pen.moveTo(u + gap * p, v + gap * q);
      pen.lineTo(u + reach * p, v + reach * q);
    }
    pen.stroke();
  }
}

// A line chart in an <svg>: series of [x, y], dots on them, a dotted line, labels at the lines.
const W = 260, H = 178, LEFT = 46, RIGHT = 18, TOP = 8, BOTTOM = 38;

export function chart(svg, { x, y, xTicks, yTicks, xLabel, format = String, series, dots = [], bound = null, labels }) {
  const px = (value) => LEFT + ((value - x[0]) / (x[1] - x[0])) * (W - LEFT - RIGHT);
  const py = (value) => H - BOTTOM - ((Math.min(value, y[1]) - y[0]) / (y[1] - y[0])) * (H - TOP - BOTTOM);
  const parts = [];
  for (const tick of yTicks) {
    parts.push(`<line class="axis" x1="${LEFT}" x2="${W - RIGHT}" y1="${py(tick)}" y2="${py(tick)}"/>`);
    parts.push(`<text x="${LEFT - 5}" y="${py(tick) + 4}" text-anchor="end">${format(tick)}</text>`);
  }
  for (const tick of xTicks) parts.push(`<text x="${px(tick)}" y="${H - BOTTOM + 16}" text-anchor="middle">${tick}</text>`);
  parts.push(`<text x="${(LEFT + W - RIGHT) / 2}" y="${H - 4}" text-anchor="middle">${xLabel}</text>`);
  if (bound !== null && bound <= y[1]) {
    parts.push(`<line class="bound" x1="${LEFT}" x2="${W - RIGHT}" y1="${py(bound)}" y2="${py(bound)}"/>`);
  }
  series.forEach((line, side) => {
    const known = line.filter(([, value]) => value !== null);
    // A curve ends where it leaves the chart above.
    const path = known.map(([u, v], i) => `${i ? "L" : "M"}${px(u).toFixed(1)} ${py(v).toFixed(1)}`).join("");
    if (known.length > 1) parts.push(`<path class="s${side}" d="${path}"/>`);
  });
  for (const [side, u, v] of dots) {
    if (u !== null && u >= x[0] && u <= x[1]) parts.push(`<circle class="s${side}" cx="${px(u)}" cy="${py(v)}" r="4.5"/>`);
  }
  labels.forEach(([text, u, v, anchor], side) => {
    if (text) parts.push(`<text class="l${Math.min(side, 1)}" x="${px(u)}" y="${py(v)}" text-anchor="${anchor}">${text}</text>`);
  });
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.innerHTML = parts.join("");
}
