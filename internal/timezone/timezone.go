// Package timezone finds time zones by their names in the IANA database, and remembers them.
//
// It does not promise that a zone is found everywhere: that needs a program that embeds the database (import time/tzdata).
package timezone

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"sync"
	"time"
)

const hint = "write a name of the IANA time zone database, such as Europe/Berlin"

var (
	shape = regexp.MustCompile(`^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*$`)
	files = regexp.MustCompile(`^(right|posix)/|^(localtime|posixrules|Factory)$`)
)

// longest is more than the longest name of a zone, in bytes; an error shows no more of a name.
const longest = 64

// Parse finds a zone by its name. "Local" is refused: a limit must not depend on the machine that decides it. It may read a
// file. The error does not name a field.
func Parse(name string) (*time.Location, error) {
	switch name {
	case "":
		return nil, errors.New("is empty: " + hint)
	case "Local":
		return nil, errors.New(`"Local" would mean another zone on every machine: ` + hint)
	}
	// What is only a way of writing another name, or a file that a machine happens to have, is no name.
	if len(name) <= longest && shape.MatchString(name) && !files.MatchString(name) {
		if zone, err := time.LoadLocation(name); err == nil {
			return zone, nil
		}
	}
	return nil, fmt.Errorf("%s is no known time zone: %s", strconv.QuoteToASCII(name[:min(len(name), longest)]), hint)
}

// most bounds what a Cache remembers: the database has some 600 names, but a zone can be spelt in ever more ways.
const most = 1024

// Cache remembers zones, because finding one means reading a file. The zero value is empty and ready. Its methods are safe for
// concurrent use.
type Cache struct {
	mu sync.RWMutex
	by map[string]*time.Location
}

// Known returns a zone that Load has found before, or nil. It reads no file.
func (c *Cache) Known(name string) *time.Location {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.by[name]
}

// Load is Parse, but for zones that are Known.
func (c *Cache) Load(name string) (*time.Location, error) {
	if zone := c.Known(name); zone != nil {
		return zone, nil
	}
	zone, err := Parse(name)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.by == nil:
		c.by = map[string]*time.Location{name: zone}
	case len(c.by) >= most:
		clear(c.by) // a cache: what is wanted is found again
		fallthrough
	default:
		c.by[name] = zone
	}
	return zone, nil
}
