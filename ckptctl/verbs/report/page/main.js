// Draws the page.

function main() {
  const report = JSON.parse(document.getElementById("data").textContent);
  const open = detailsOf(report);
  const paths = [report.path, report.other].filter((path) => path !== null);
  document.title = visible(`${paths.join(" and ")}: ckptctl report`);
  summary(report);
  findings(report, open);
  difference(report, open);
  movement(report);
  fit(report);
  if (report.tensors.length > 0) treemap(report, open);
  dtypes(report);
  files(report);
  tensorTable(report, open);
  document.getElementById("sections").append(
    element("footer", { class: "dim" }, `Written by ckptctl ${report.ckptctl} (${report.schema}).`),
  );
  window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
  const named = /^#tensor=(.+)$/.exec(location.hash);
  if (named) open(decodeURIComponent(named[1]));
}

main();
