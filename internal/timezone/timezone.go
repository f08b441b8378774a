// Package timezone finds time zones by their names in the IANA database, and caches them. A program that must find them
// on every host embeds the database (import time/tzdata).
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

// longest bounds the bytes of a zone's name; all names are shorter. An error shows no more of a name.
const longest = 64

// Parse finds a zone by its name. It rejects "Local", because a limit must not depend on the machine that decides it.
// It may read a file. The error does not name a field.
func Parse(name string) (*time.Location, error) {
	switch name {
	case "":
		return nil, errors.New("is empty: " + hint)
	case "Local":
		return nil, errors.New(`"Local" would mean another zone on every machine: ` + hint)
	}
	// Other spellings of a name, and files that only some machines have, are rejected.
	if len(name) <= longest && shape.MatchString(name) && !files.MatchString(name) {
		if zone, err := time.LoadLocation(name); err == nil {
			return zone, nil
		}
	}
	return nil, fmt.Errorf("%s is no known time zone: %s", strconv.QuoteToASCII(name[:min(len(name), longest)]), hint)
}

// most bounds the names in a Cache. The database has some 600 names, but a zone has ever more spellings.
const most = 1024

// Cache keeps zones, because finding one means reading a file. The zero value is empty and ready for use. Its methods
// are safe for concurrent use.
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

// Load is Parse, with a look into the Cache before it.
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
		clear(c.by) // they are found again when they are needed
		fallthrough
	default:
		c.by[name] = zone
	}
	return zone, nil
}
