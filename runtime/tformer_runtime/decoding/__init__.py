"""From requests to results: search, sampling, rules, batches.

options, request             what a caller asks for, and what comes back
generator                    requests → tasks of the search → results
scheduler, batch_rows        which rows decode together, step by step (continuous batching)
sequence                     rows of the search: what has been chosen, and where each row is in the batch
token_search, beam_search    choose tokens row by row, or by beams
sampling                     temperature, top-k, top-p, min-p
logit_rules                  penalties and forbidden tokens; constraints: regex, JSON schema, grammar
speculation, drafting        guess several tokens and check them in one step
ordered, worker_pool         many inputs, results in their order
"""
