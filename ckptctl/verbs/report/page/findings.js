// What is wrong. Findings that say the same of several places are one.

const GROUPS = 10;
const PLACES = 4;
const NO_TENSOR = "a tensor is missing";

function findings(report, open) {
  if (report.findings.length === 0) return;
  const total = report.errors + report.unknown + report.warnings;
  const listed = new Set(report.tensors.map((tensor) => tensor.name));
  const list = findingList(report.findings, report.files, (name) => listed.has(name) && (() => open(name)));
  section("findings", `Findings (${grouped(total)})`, list);
}

// opener(name) returns what opens the details of a tensor, if there are any.
function findingList(found, files, opener) {
  const missing = new Set(files.filter((file) => file.state === "missing").map((file) => file.path));
  const groups = new Map();
  for (const one of found) {
    const state = one.severity !== "error" ? one.severity : missing.has(one.file) ? "missing" : "damaged";
    const key = JSON.stringify([state, one.what, one.why]);
    if (!groups.has(key)) groups.set(key, { state, group: [] });
    groups.get(key).group.push(one);
  }
  const items = [...groups.values()].map(({ state, group }) => findingItem(state, group, opener));
  return element("ul", { class: "findings" }, unfolding(items, GROUPS));
}

function findingItem(state, group, opener) {
  const [{ severity, what, why }] = group;
  const places = group.filter((one) => one.where && !what.includes(one.where)).map((one) => placeOf(one, opener(one.tensor)));
  return element(
    "li",
    { class: state },
    element("div", {}, element("strong", {}, `${severity}: `), prose(what), group.length > 1 ? ` (${grouped(group.length)} times)` : null),
    why ? element("div", { class: "dim" }, prose(why)) : null,
    places.length ? element("ul", { class: "places" }, unfolding(places, PLACES)) : null,
  );
}

function placeOf(finding, open) {
  const where = prose(finding.where);
  return element("li", {}, open ? element("button", { class: "link", click: open }, where) : where);
}

// The first few items, and a button that shows the others, which are printed; one more is no reason for it.
function unfolding(items, count) {
  if (items.length <= count + 1) return items;
  const rest = items.slice(count);
  for (const item of rest) item.classList.add("folded");
  const more = element("button", {}, `Show ${grouped(rest.length)} more`);
  const last = element("li", { class: "more" }, more);
  more.addEventListener("click", () => {
    for (const item of rest) item.classList.remove("folded");
    last.remove();
    const next = rest[0].querySelector("button");
    if (next) next.focus();
  });
  return [...items, last];
}
