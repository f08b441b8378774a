// Package overrides keeps the overrides of limits that operators set while nodes run, the same on all members of a cluster.
//
// A Book is one member's: it holds entries under versions, so that members that exchange their entries in any order and any number of
// times end up with the same ones, and writes them to a file before it says that it has them. A Replicator sends changes to the other
// members and compares books with them until all are equal; a Service is what operators call.
//
// It does not promise that all members know an override when the operator is answered (the answer says which ones do), nor that of two
// concurrent changes of one override both are seen (the later version wins on all members), nor that a deleted override cannot come back
// with a member that was away while MaxDeleted others were deleted. What an override means is package policy's.
package overrides

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/weirlimit/weir/internal/file"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
)

// Bounds of a Book. What operators set is rejected beyond MaxOverrides and MaxBytes. What members tell each other is taken in up to twice
// as much: two sides of a cluster that could not reach each other may both have been filled.
const (
	MaxOverrides = 10_000
	MaxBytes     = 8 << 20 // of what they are for and of their settings, with 64 bytes for each
	// MaxDeleted and MaxDeletedBytes bound the deletions that are remembered: of more, the oldest are forgotten.
	MaxDeleted      = 10_000
	MaxDeletedBytes = 2 << 20
)

const (
	maxCounter = 1 << 53 // of a Version: what a JSON number holds exactly
	maxName    = 128     // bytes of a member's and of a caller's name
	entryBytes = 64      // what an entry counts for besides its texts
)

// ID is what an override is for: a key, or the keys that begin with Prefix, of a policy.
type ID struct{ Policy, Key, Prefix string }

// Compare orders IDs by policy, then keys before prefixes.
func (id ID) Compare(other ID) int {
	return cmp.Or(strings.Compare(id.Policy, other.Policy), strings.Compare(id.Prefix, other.Prefix), strings.Compare(id.Key, other.Key))
}

// Version orders the changes of an override. Counter is a Lamport clock (Lamport, 1978): above that of every entry that the node knew
// when it made the change. Node is that node's name.
type Version struct {
	Counter uint64
	Node    string
}

// String returns the version as operators see it, "12@node-a".
func (v Version) String() string { return fmt.Sprintf("%d@%s", v.Counter, v.Node) }

// Entry is the last change of an override.
type Entry struct {
	ID
	Version
	Settings string    // see policy.Override; empty: the override was deleted
	By       string    // who changed it, as the access file names the caller
	At       time.Time // when, by the clock of the node that was asked: for people, nothing is decided by it
}

// Deleted reports whether the entry says that there is no override.
func (e *Entry) Deleted() bool { return e.Settings == "" }

// Override returns an entry that is not Deleted as a policy takes it.
func (e *Entry) Override() policy.Override {
	return policy.Override{Policy: e.Policy, Key: e.Key, Prefix: e.Prefix, Settings: e.Settings}
}

// newer orders entries of one ID. A member that has lost its file may use a counter twice: then the rest of the entry decides, the same
// on all members, a deletion before everything else.
func (e *Entry) newer(other *Entry) bool {
	deleted := func(e *Entry) int {
		if e.Deleted() {
			return 1
		}
		return 0
	}
	return cmp.Or(cmp.Compare(e.Counter, other.Counter), strings.Compare(e.Node, other.Node), cmp.Compare(deleted(e), deleted(other)),
		strings.Compare(e.Settings, other.Settings), strings.Compare(e.By, other.By), e.At.Compare(other.At)) > 0
}

// bytes is what an entry counts for.
func (e *Entry) bytes() int {
	return entryBytes + len(e.Policy) + len(e.Key) + len(e.Prefix) + len(e.Node) + len(e.Settings) + len(e.By)
}

// sum is a hash of all that an entry says.
func (e *Entry) sum() [sha256.Size]byte {
	var b []byte
	for _, text := range []string{e.Policy, e.Key, e.Prefix, e.Node, e.Settings, e.By} {
		b = binary.AppendUvarint(b, uint64(len(text)))
		b = append(b, text...)
	}
	b = binary.AppendUvarint(b, e.Counter)
	return sha256.Sum256(binary.AppendVarint(b, e.At.UnixMilli()))
}

// valid says what is wrong with an entry of a file or of another member. The error names the field. Settings are not read: another
// member may have other policies.
func (e *Entry) valid() error {
	o := e.Override()
	if err := o.Valid(); err != nil {
		return err
	}
	for _, name := range []struct{ field, text string }{{"node", e.Node}, {"by", e.By}} {
		if len(name.text) > maxName || !utf8.ValidString(name.text) {
			return limit.NewError(limit.Invalid, name.field, "is not a name of at most 128 bytes of UTF-8")
		}
	}
	switch {
	case e.Node == "":
		return limit.NewError(limit.Invalid, "node", "is missing")
	case e.Counter == 0 || e.Counter > maxCounter:
		return limit.NewError(limit.Invalid, "counter", "is not a number from 1 to 2^53")
	case !utf8.ValidString(e.Settings):
		return limit.NewError(limit.Invalid, "settings", "are not valid UTF-8")
	case e.At.UnixMilli() < 0 || e.At.UnixMilli() > maxMillis:
		return limit.NewError(limit.Invalid, "at", "is not a time from 1970 to 9999")
	}
	return nil
}

// inMillis is a time as precise as members tell it to each other.
func inMillis(t time.Time) time.Time { return time.UnixMilli(t.UnixMilli()).UTC() }

// maxMillis is the end of the year 9999 in milliseconds since 1970, beyond which RFC 3339 has no time.
const maxMillis = 253402300799999

// Digest stands for the content of a Book: members whose digests are equal have the same entries.
type Digest [sha256.Size]byte

// Book is one member's overrides. Its methods are safe for concurrent use.
type Book struct {
	file *file.Replacer // nil: entries are lost with the process

	change sync.Mutex // held while a change is written: one at a time
	now    atomic.Pointer[contents]
}

// contents are a book's entries, and how it stands with its file. Those of a Book are not changed, but replaced by a changed clone.
type contents struct {
	entries       map[ID]*Entry
	sorted        []*Entry // nil: not worked out
	live, deleted sums
	counter       uint64 // the highest
	digest        Digest

	dirty  bool // the file lacks entries of other members that are in force
	failed error
	writes struct{ done, failed uint64 }
}

// OpenBook returns the book in the file, which is made at the first change. An empty name is a book without one. A file that is not a
// book is an error that says where it goes wrong.
func OpenBook(name string) (*Book, error) {
	b, all := new(Book), &contents{entries: make(map[ID]*Entry)}
	if name != "" {
		b.file = &file.Replacer{Name: name, Perm: 0o600, Timeout: file.Timeout}
		entries, err := load(name)
		if err != nil {
			return nil, err
		}
		for i := range entries {
			all.put(&entries[i])
		}
	}
	b.publish(all, nil)
	return b, nil
}

// sums are of the overrides there are, or of the deletions.
type sums struct{ entries, bytes int }

// put takes an entry in place of what there is.
func (c *contents) put(e *Entry) {
	c.remove(e.ID)
	c.entries[e.ID] = e
	c.count(e, 1)
	c.counter = max(c.counter, e.Counter)
}

func (c *contents) remove(id ID) {
	if was := c.entries[id]; was != nil {
		delete(c.entries, id)
		c.count(was, -1)
	}
}

// count adds or takes away what an entry is in the sums.
func (c *contents) count(e *Entry, sign int) {
	c.sorted = nil
	of := &c.live
	if e.Deleted() {
		of = &c.deleted
	}
	of.entries += sign
	of.bytes += sign * e.bytes()
	for i, x := range e.sum() {
		c.digest[i] ^= x
	}
}

// clone returns a copy to make a change in.
func (c *contents) clone() *contents {
	out := *c
	out.entries = maps.Clone(c.entries)
	return &out
}

// forget drops the oldest deletions of which there are too many. Members that have the same entries drop the same ones.
func (c *contents) forget() {
	if c.deleted.entries <= MaxDeleted && c.deleted.bytes <= MaxDeletedBytes {
		return
	}
	var dead []*Entry
	for _, e := range c.entries {
		if e.Deleted() {
			dead = append(dead, e)
		}
	}
	slices.SortFunc(dead, func(a, b *Entry) int { // the newest first
		return cmp.Or(cmp.Compare(b.Counter, a.Counter), strings.Compare(b.Node, a.Node), b.Compare(a.ID))
	})
	// What is kept are the first ones, whatever follows them: so it does not matter in which order members learn of deletions.
	kept := 0
	for i, e := range dead {
		if kept += e.bytes(); i >= MaxDeleted || kept > MaxDeletedBytes {
			c.remove(e.ID)
		}
	}
}

func (c *contents) sort() []*Entry {
	if c.sorted == nil {
		c.sorted = slices.SortedFunc(maps.Values(c.entries), func(a, b *Entry) int { return a.Compare(b.ID) })
	}
	return c.sorted
}

// ErrFull is wrapped by the error for more overrides than a Book takes.
var ErrFull = errors.New("the overrides are full")

// Change makes a change of this member: an entry without a version gets one. It returns the entry, and what was there before it, nil when
// there was nothing; a deletion of what there is not changes nothing, and returns nil twice. With a file, the entry is in it when Change returns, or the error says why not and
// nothing has changed.
func (b *Book) Change(node string, e Entry) (now, before *Entry, err error) {
	b.change.Lock()
	defer b.change.Unlock()
	was := b.now.Load()
	next := was.clone()
	before = next.entries[e.ID]
	if before != nil && before.Deleted() {
		before = nil
	}
	if e.Deleted() && before == nil {
		return nil, nil, nil
	}
	if next.counter >= maxCounter {
		return nil, nil, errors.New("the version numbers are used up: remove overrides.json of all members while none runs")
	}
	e.Version = Version{next.counter + 1, node}
	e.At = inMillis(e.At)
	if err := e.valid(); err != nil {
		return nil, nil, err
	}
	next.put(&e)
	next.forget()
	if !e.Deleted() && (next.live.entries > MaxOverrides && before == nil || next.live.bytes > max(MaxBytes, was.live.bytes)) {
		return nil, nil, fmt.Errorf("%w: there may be %d, with %d bytes: delete some, or put them into the policy file", ErrFull, MaxOverrides, MaxBytes)
	}
	if err := b.write(next); err != nil {
		kept := *was
		kept.writes = next.writes
		b.publish(&kept, err) // the file may have the change
		return nil, nil, err
	}
	b.publish(next, nil)
	return &e, before, nil
}

// Merge takes in entries of another member, of which those that are newer than the book's own change it. It reports how many did. Those
// that are invalid, and those that there is no room for, are left out, and the error tells of the first. An entry is in force even
// if it could not be written to the file: see Durable.
func (b *Book) Merge(entries []Entry) (changed int, err error) {
	b.change.Lock()
	defer b.change.Unlock()
	was := b.now.Load()
	next := was.clone()
	for _, one := range entries {
		e := &one
		if wrong := e.valid(); wrong != nil {
			err = cmp.Or(err, fmt.Errorf("override of policy %.128q: %w", e.Policy, wrong))
			continue
		}
		if has := next.entries[e.ID]; has != nil && !e.newer(has) {
			continue
		}
		if !e.Deleted() && (next.live.bytes+e.bytes() > 2*MaxBytes || next.live.entries >= 2*MaxOverrides) {
			err = cmp.Or(err, fmt.Errorf("%w, with those of other members", ErrFull))
			continue
		}
		next.put(e)
		changed++
	}
	next.forget()
	if next.digest == was.digest {
		return 0, err
	}
	b.publish(next, b.write(next))
	return changed, err
}

// publish puts contents into force; failed says why they are not in the file.
func (b *Book) publish(next *contents, failed error) {
	next.sort()
	next.dirty, next.failed = failed != nil, failed
	b.now.Store(next)
}

// write writes contents to the file, if there is one.
func (b *Book) write(c *contents) error {
	if b.file == nil {
		return nil
	}
	err := b.save(c.sort())
	if c.writes.done++; err != nil {
		c.writes.failed++
	}
	return err
}

// Retry writes the file again if it lacks entries.
func (b *Book) Retry() error {
	b.change.Lock()
	defer b.change.Unlock()
	if !b.now.Load().dirty {
		return nil
	}
	next := b.now.Load().clone()
	err := b.write(next)
	b.publish(next, err)
	return err
}

// Durable reports whether all entries are in the book's file. A book without a file never is.
func (b *Book) Durable() bool { return b.file != nil && !b.now.Load().dirty }

// Digest returns what stands for the content.
func (b *Book) Digest() Digest { return b.now.Load().digest }

// Stats are a Book's numbers.
type Stats struct {
	Overrides, Deleted, Bytes int
	Durable                   bool
	WriteError                error  // why the file lacks entries that are in force; nil: it does not
	Writes, WritesFailed      uint64 // since the process began
}

// Stats returns the numbers of now.
func (b *Book) Stats() Stats {
	c := b.now.Load()
	return Stats{
		Overrides: c.live.entries, Deleted: c.deleted.entries, Bytes: c.live.bytes, Durable: b.file != nil && !c.dirty,
		WriteError: c.failed, Writes: c.writes.done, WritesFailed: c.writes.failed,
	}
}

// Get returns the entry of an override that there is.
func (b *Book) Get(id ID) (*Entry, bool) {
	e := b.now.Load().entries[id]
	return e, e != nil && !e.Deleted()
}

// sorted returns all entries in order of their IDs. Nobody changes them.
func (b *Book) sorted() []*Entry { return b.now.Load().sorted }

// after returns the entries, deletions included, from the first one above an ID on; the zero ID is below all.
func (b *Book) after(id ID) []*Entry {
	all := b.sorted()
	at, found := slices.BinarySearchFunc(all, id, func(e *Entry, id ID) int { return e.Compare(id) })
	if found {
		at++
	}
	return all[at:]
}

// After returns the overrides, without deletions, above an ID in the order of IDs; the zero ID is below all.
func (b *Book) After(id ID) iter.Seq[*Entry] {
	return func(yield func(*Entry) bool) {
		for _, e := range b.after(id) {
			if !e.Deleted() && !yield(e) {
				return
			}
		}
	}
}

// Overrides returns all overrides as policies take them, in order of their IDs.
func (b *Book) Overrides() []policy.Override {
	list := make([]policy.Override, 0, b.Stats().Overrides)
	for e := range b.After(ID{}) {
		list = append(list, e.Override())
	}
	return list
}
