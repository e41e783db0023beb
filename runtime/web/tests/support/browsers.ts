/**
 * The browsers of tests of pages: those of the system (`apt-get install chromium firefox-esr`), or of the variables CHROMIUM
 * and FIREFOX. Tests of a browser that is not installed are skipped.
 */

import { existsSync } from "node:fs";
import { join } from "node:path";

const FOLDERS = ["/usr/bin", "/usr/local/bin", "/snap/bin"];

export const CHROMIUM = process.env["CHROMIUM"] ?? installed("chromium", "chromium-browser", "google-chrome");
export const FIREFOX = process.env["FIREFOX"] ?? installed("firefox-esr", "firefox");

function installed(...names: string[]): string | undefined {
  return FOLDERS.flatMap((folder) => names.map((name) => join(folder, name))).find(existsSync);
}
