// Package prefetch has the processor fetch memory that is about to be read. A program that follows many chains of
// pointers to uncached memory names the first place of all chains, then the second of all, and so on: the processor
// fetches them in parallel, where otherwise the program would wait for each.
//
// A processor may ignore it, and on some processors Line does nothing. It reads no value, so other goroutines may write
// to the memory at the same time.
package prefetch
