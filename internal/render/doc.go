// Package render prints what nodes answer to commands, for eyes and as JSON.
//
// What is printed for eyes may change at any time. What a caller or a file has chosen, such as a key, is quoted where it could control a
// terminal.
package render
