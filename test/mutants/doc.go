// Package mutants breaks the product on purpose, one rule at a time, and wants a test to fail that passes otherwise. It
// holds nothing but tests.
//
// A mutant is an edit of a source file that the go command is told of through -overlay: the product has no switch for
// it, and the tree stays as it is. The list is in list_test.go. TestMutants runs of each mutant the one test that is
// known to notice it, and wants that to fail for the reason given there.
//
//	go test ./test/mutants                                         every mutant still can be made
//	go test ./test/mutants -mutants                                and is noticed: minutes, nearly all of it the compiler's
//	go test ./test/mutants -mutants -run 'TestMutants/vote' -v     those of voters, and what the tests say
//
// What it does not promise: that a rule which is not in the list is tested.
package mutants
