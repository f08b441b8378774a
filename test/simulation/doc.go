// Package simulation runs whole clusters in one goroutine: the real ownership.Core of every node over the real
// store.Store, in virtual time, over a network that delays, loses, repeats and reorders, cuts and heals, with nodes
// that crash, pause, restart, leave and join, and clocks that differ by hours and run at different rates.
//
// It holds nothing but tests. TestSeeds makes a run of each number: everything in it follows from that number, so that
// a run that fails can be looked at again, and runs every fourth one twice to show that this is so. TestScenarios runs
// the scripts in testdata, whose expected output is to be read. Package mutants breaks rules and wants these tests to
// notice.
//
//	go test ./test/simulation                                           a spread of seeds, all scenarios
//	go test ./test/simulation -run TestSeeds -seeds 10000 -timeout 1h   more seeds
//	go test ./test/simulation -run TestSeeds -seed 42 -v                one, and what happens in it
//	go test ./test/simulation -run TestScenarios -update                after a change; to be looked at with git diff
//
// Clients check, reserve, commit and cancel, take, renew and release leases, repeat requests under their ids until they
// are answered, and ask about several keys at once, all or none. Hosts' wall clocks are wrong by up to 200 ms. In a
// third of the runs chunks are small, so that what is told together elsewhere comes in several.
//
// In half of the runs of TestSeeds borrowers, each with a clock that is up to 0.1 % off, take
// units of keys on loan; what is refused for want of these is asked for first. Besides what they admit, what owners
// hold of it is checked after each step.
//
// TestCallSeeds runs nodes that are whole but for membership and connections, limiter.Limiter and runner.Runner with
// all of their goroutines, in a synctest bubble: callers are answered by owners, from memory of refusals and by
// on_error while messages are lost and nodes leave, join and crash. In half of its runs nodes and clients, which may
// crash, borrow units; what they admit is judged with the rest, and owners are held to having lent it. It runs on one
// CPU, and no two messages arrive at one instant, but which of two goroutines goes first that wake at one instant
// otherwise is not the seed's to say: of twenty seeds one differs when it is run again, about, and may have to be run
// some times to show again what it has shown.
//
//	go test ./test/simulation -run TestCallSeeds -calls 1000 -timeout 1h   more seeds
//	go test ./test/simulation -run TestCallSeeds -seed 42 -v               one, and all answers
//	go test ./test/simulation -run TestCallSeeds -calls 100 -twice -v      how many repeat themselves
//
// What is right is said by package checker, during a run (Protocol) and at its end (Check).
package simulation
