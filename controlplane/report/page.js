"use strict";
// Filters the commands, and opens or closes all of them. The page is complete without it.
(() => {
  const steps = [...document.querySelectorAll("details.step")];
  const words = document.getElementById("words");
  const bad = document.getElementById("bad");
  const found = document.getElementById("found");
  const filter = () => {
    const query = words.value.trim().toLowerCase();
    let count = 0;
    for (const step of steps) {
      let shown = 0;
      for (const row of step.querySelectorAll("tbody tr")) {
        const matches = (!bad.checked || row.classList.contains("bad")) &&
          (!query || row.textContent.toLowerCase().includes(query));
        row.hidden = !matches;
        shown += matches;
      }
      step.hidden = !shown;
      if (shown && (query || bad.checked)) step.open = true;
      count += shown;
    }
    found.textContent = query || bad.checked ? `${count} shown` : "";
  };
  words.addEventListener("input", filter);
  bad.addEventListener("change", filter);
  for (const [name, open] of [["open", true], ["close", false]])
    document.getElementById(name).addEventListener("click", () => {
      for (const step of steps) step.open = open;
    });
  document.getElementById("filter").hidden = false;
})();
