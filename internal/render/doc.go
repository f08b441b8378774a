// Package render prints the answers of nodes to commands, as text for people and as JSON.
//
// The text may change at any time. Content from callers or files, such as a key, is quoted where it could control a
// terminal.
package render
