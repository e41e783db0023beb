"""From requests to results: search, sampling, rules, batches.

options/                     the options of a caller and the settings of a request, from one table
rules/                       penalties and forbidden tokens; regex, JSON schema, grammar
request                      a request, and its result
generator, streaming         requests → tasks of the search → results, or pieces of text
scheduler, batch_rows        continuous batching: the rows that decode together, step by step
sequence, row_placement      the state of a search, and the places of its rows in the batch
token_search, beam_search    choose tokens row by row, or by beams
sampling                     temperature, top-k, top-p, min-p
speculation, drafting        guess several tokens and check them in one step
ordered, worker_pool         many inputs, results in their order
batch_queue                  calls that arrive one by one, computed in batches
"""
