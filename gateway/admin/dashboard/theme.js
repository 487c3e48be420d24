// Before the first paint: the theme chosen last time, or as the system has it.
"use strict";
try {
  const chosen = localStorage.getItem("homing-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // storage is off: as the system has it
}
