"""Rows of tables through a model, on many machines by Ray. docs/scaling.md describes it.

columns        the columns of the results of each task, and their Arrow types
calls          the call of a task for many inputs, whose bad inputs keep their errors
predictor      `Predictor`, for `map_batches` of Ray Data
storage        files of this machine and of object stores
row_files      files of rows: Parquet, JSON lines, CSV, text; their parts
output_folder  the folder of the results of a job, part by part, and its journal
cluster        Ray: its start, and workers that may die
job            `tformer-run --ray`: the parts of all files, each exactly once
"""
