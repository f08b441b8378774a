package strictyaml

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Error is one mistake in a file.
type Error struct {
	File string `json:"file"`
	// Line and Column count from 1; columns count characters, not bytes.
	Line   int `json:"line"`
	Column int `json:"column"`
	// Field is the path of the field in the file, such as "policies[0].overrides[2].limit"; empty: the mistake is in no
	// field.
	Field string `json:"field,omitempty"`
	// Message says what is wrong and what to do.
	Message string `json:"message"`
}

// Error returns "file:line:column: field: message".
func (e *Error) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("%s:%d:%d: %s", e.File, e.Line, e.Column, e.Message)
	}
	return fmt.Sprintf("%s:%d:%d: %s: %s", e.File, e.Line, e.Column, e.Field, e.Message)
}

// Errors has the mistakes of a file in the order of their positions: up to MaxErrors, and, if there are more, one that
// says so.
type Errors []*Error

// Error returns one line for each mistake.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, one := range e {
		lines[i] = one.Error()
	}
	return strings.Join(lines, "\n")
}

// MaxErrors bounds the list, because people read it.
const MaxErrors = 1000

// Mistakes collects Errors. A field from which several limits take a value is read once for each of them, but its
// mistake is listed once.
type Mistakes struct {
	File  string // name of the file
	list  Errors
	seen  map[Error]struct{}
	count int
}

// Add adds a mistake, unless it is there already.
func (m *Mistakes) Add(line, column int, field, message string) {
	m.count++
	if m.Full() {
		return
	}
	if len(m.list) == MaxErrors {
		field, message = "", "too many mistakes: this one and the rest are not listed"
	}
	e := Error{File: m.File, Line: line, Column: column, Field: field, Message: message}
	if _, known := m.seen[e]; known {
		return
	}
	if m.seen == nil {
		m.seen = make(map[Error]struct{})
	}
	m.seen[e] = struct{}{}
	m.list = append(m.list, &e)
}

// Count returns how often a mistake was met so far, also one that is listed already. A value is valid if reading it does
// not change Count.
func (m *Mistakes) Count() int { return m.count }

// Full reports whether no more mistakes are collected.
func (m *Mistakes) Full() bool { return len(m.list) > MaxErrors }

// Err returns the mistakes as an error; nil: there is none.
func (m *Mistakes) Err() error {
	if len(m.list) == 0 {
		return nil
	}
	return m.Sorted()
}

// Sorted returns the mistakes in the order of the file.
func (m *Mistakes) Sorted() Errors {
	slices.SortStableFunc(m.list, func(a, b *Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return m.list
}
