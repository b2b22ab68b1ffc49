// The colours of requests and events, and what stands on them readably.

const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a6fd1", "#7a8b2e"]; // Okabe and Ito's, extended
const KINDS = {copy: ["#d55e00", "copy on write"], fork: ["#0072b2", "fork"], swap_out: ["#cc79a7", "swapped out"], swap_in: ["#009e73", "swapped in"],
               recompute: ["#cc79a7", "preempted"], pin: ["#e69f00", "pinned"], hit: ["#56b4e9", "found again"]};
const RINGS = ["copy", "swap_out", "swap_in", "hit"]; // what happens to a block, not to a request

function percent(x) { return (100 * x).toFixed(1) + " %"; }  // for people
function length(x) { return (100 * x).toFixed(1) + "%"; }    // for style sheets

function rgb(hex) { return [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)); }
function mix(hex, other, share) { // that share of `other`
  const a = rgb(hex), b = rgb(other);
  return "#" + a.map((x, i) => Math.round(x + (b[i] - x) * share).toString(16).padStart(2, "0")).join("");
}
// Relative luminance, 0 to 1, and the contrast of two colours, as WCAG defines them.
function luminance(hex) {
  return rgb(hex).map(x => (x /= 255) <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4).reduce((sum, x, i) => sum + x * [.2126, .7152, .0722][i], 0);
}
function contrast(a, b) {
  const [light, dark] = [luminance(a), luminance(b)].sort((x, y) => y - x);
  return (light + .05) / (dark + .05);
}
const inks = new Map(); // by colour: which of black and white stands on it; one of them has a contrast of at least 4.5
function inkOn(color) {
  if (!inks.has(color)) inks.set(color, contrast("#ffffff", color) >= contrast("#000000", color) ? "#ffffff" : "#000000");
  return inks.get(color);
}

const SHADES = PALETTE.flatMap(c => [c, mix(c, "#ffffff", .4), mix(c, "#000000", .34), mix(c, "#ffffff", .62), mix(c, "#000000", .54)]);
function shadeOf(q) { // a hue for each request, a shade for each of its answers
  return (q.request + 7) % 8 * 5 + (q.index === 0 ? 0 : (q.index - 1) % 4 + 1);
}
function colorOf(q) { return SHADES[shadeOf(q)]; }
