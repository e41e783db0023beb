"""`tformer-run`.

main         the command: read inputs, run the job, write results
options      the command's options, from those of generation and of each task
job          run a model once for each input; jobs: which job belongs to which task
generation, vectors, forecasting, transcription   jobs with outputs of their own
result_file  an output file that a later run can go on with
heatmaps     attention as a picture
"""
