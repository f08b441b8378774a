// Package prefetch has the processor fetch memory that is about to be read. A program that follows many chains of pointers
// to uncached memory names the first place of all chains, then the second of all, and so on: the processor fetches them in
// parallel, where otherwise the program would wait for each.
//
// It promises nothing: a processor may ignore it, and on some nothing is done. It reads nothing that a program can see, so that whatever
// may be named may also be written to meanwhile.
package prefetch
