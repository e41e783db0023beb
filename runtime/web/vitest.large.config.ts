import { defineConfig } from "vitest/config";

process.env["ORT_DISABLE_TELEMETRY"] ??= "1"; // also of the scripts in Python that tests run

/** Tests of models of the size of products: they take an hour, 6 GB of memory and 3 GB of disk. */
export default defineConfig({
  test: {
    include: ["tests/large/*.test.ts"],
    globalSetup: ["tests/support/largeModels.ts"],
    testTimeout: 1_200_000,
    hookTimeout: 1_200_000,
    pool: "forks",
    fileParallelism: false,
  },
});
