"""`tformer-run`.

main         the command: read inputs, run the job, write results
input_lines  lines of the input file, and the progress bar over them
options      the options of the command, collected from generation and from each task
job          run a model once per input; jobs: map a task to its job
generation, vectors, forecasting, transcription   jobs with their own output formats
errors       errors as one sentence and an exit status
result_file  an output file that a later run can resume
tables       `--ray`: rows of files, on many machines
heatmaps     attention weights as images
"""
