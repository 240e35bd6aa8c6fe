// What is wrong. Findings that say the same of several places are one.

const GROUPS = 10;
const PLACES = 4;

function findings(report, open) {
  if (report.findings.length === 0) return;
  const total = report.errors + report.unknown + report.warnings;
  const listed = new Set(report.tensors.map((tensor) => tensor.name));
  const list = findingList(report.findings, (name) => listed.has(name) && (() => open(name)));
  section("findings", `Findings (${grouped(total)})`, list);
}

// opener(name) returns what opens the details of a tensor, if there are any.
function findingList(found, opener) {
  const groups = new Map();
  for (const one of found) {
    const key = JSON.stringify([one.severity, one.what, one.why]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(one);
  }
  const items = [...groups.values()].map((group) => () => findingItem(group, opener));
  return element("ul", { class: "findings" }, unfolding(items, GROUPS));
}

function findingItem(group, opener) {
  const [{ severity, what, why }] = group;
  const places = group.filter((one) => one.where).map((one) => () => placeOf(one, opener(one.tensor)));
  return element(
    "li",
    { class: severity },
    element("div", {}, element("strong", {}, `${severity}: `), what, group.length > 1 ? ` (${grouped(group.length)} times)` : null),
    why ? element("div", { class: "dim" }, why) : null,
    places.length ? element("ul", { class: "places" }, unfolding(places, PLACES)) : null,
  );
}

function placeOf(finding, open) {
  return element("li", {}, open ? element("button", { class: "link", click: open }, finding.where) : finding.where);
}

// The first few of what makes items, and a button that adds the others; one more is no reason for it.
function unfolding(makers, count) {
  if (makers.length <= count + 1) return makers.map((make) => make());
  const first = makers.slice(0, count).map((make) => make());
  const more = element("button", {}, `Show ${grouped(makers.length - count)} more`);
  const item = element("li", { class: "more" }, more);
  more.addEventListener("click", () => {
    const rest = makers.slice(count).map((make) => make());
    item.replaceWith(...rest);
    const next = rest[0].querySelector("button");
    if (next) next.focus();
  });
  return [...first, item];
}
