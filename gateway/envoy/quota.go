package envoy

import (
	"strings"

	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/limit"
)

// Bounds of the id of a quota bucket.
const (
	MaxQuotaEntries = 16   // entries of an id
	MaxQuotaText    = 1024 // bytes of the keys and values of an id together
)

var quotaFields = []string{"bucket", "policy", "key", "share"}

// quotaBucket is one element of quota_buckets: the policy for the buckets with some ids.
type quotaBucket struct {
	entries map[string]string // the ids' entries; the value wildcard: any value
	policy  string
	key     []string // texts and, at odd indexes, names of entries
	share   int
	line    int
}

// wildcard is the value in a file that any value of an id matches.
const wildcard = "*"

// QuotaTarget is the policy and key for a bucket. Share is the percentage of the limit that all data planes may have
// together, 1 to 100.
type QuotaTarget struct {
	Policy, Key string
	Share       int
}

// Quotas returns the number of quota buckets in the files, of all domains.
func (c *Config) Quotas() (n int) {
	for _, d := range c.domains {
		n += len(d.quotas)
	}
	return n
}

// Quota returns the policy and key for the bucket with an id. ok is false when no file describes the bucket.
func (c *Config) Quota(domain string, id map[string]string) (t QuotaTarget, ok bool) {
	d := c.domains[domain]
	if d == nil {
		return t, false
	}
	for i := range d.quotas {
		if b := &d.quotas[i]; b.matches(id) {
			return QuotaTarget{Policy: b.policy, Key: b.keyOf(id), Share: b.share}, true
		}
	}
	return t, false
}

// matches says whether an id is one of the bucket's. With the entries of another quotaBucket it says whether all ids of
// that are.
func (b *quotaBucket) matches(id map[string]string) bool {
	if len(id) != len(b.entries) {
		return false
	}
	for k, want := range b.entries {
		if v, given := id[k]; !given || want != wildcard && v != want {
			return false
		}
	}
	return true
}

func (b *quotaBucket) keyOf(id map[string]string) string {
	var key strings.Builder
	for i, part := range b.key {
		if i%2 == 1 {
			part = id[part]
		}
		key.WriteString(part)
	}
	return limit.KeyOf(key.String())
}

// quotas reads quota_buckets into a domain.
func (r *reader) quotas(list strictyaml.Field, d *domain) {
	for f := range r.Maps(list, "buckets, such as {bucket: {tenant: \"*\"}, policy: per-tenant, key: \"{tenant}\"}",
		quotaFields) {
		r.quota(f, d)
	}
}

func (r *reader) quota(f strictyaml.Fields, d *domain) {
	before := r.Count()
	b := quotaBucket{share: 100, line: f.At.Line}
	bucket := r.Required(f, "bucket", `{tenant: "*"}`)
	b.entries = r.bucketID(bucket)
	one := r.Required(f, "policy", "per-tenant")
	if b.policy = r.policyName(one); b.policy != "" && r.opts.Quotable != nil {
		if err := r.opts.Quotable(b.policy); err != nil {
			r.Fail(one.Node, one.Path, "%v", err)
		}
	}
	key := r.Required(f, "key", `"{tenant}"`)
	if text, ok := r.Text(key, 1, strictyaml.MaxFile); ok {
		b.key = r.keyTemplate(key, text, b.entries)
	}
	if share := f.Field("share"); share.Given() {
		b.share = int(r.Integer(share, 1, 100))
	}
	if r.Count() > before {
		return
	}
	for i := range d.quotas {
		// the value * of b matches only *, which means that other has all values
		if other := &d.quotas[i]; other.matches(b.entries) {
			r.Fail(bucket.Key, bucket.Path, "has no bucket left: that of line %d has all of them", other.line)
			return
		}
	}
	d.quotas = append(d.quotas, b)
}

// bucketID reads the entries of a bucket's ids.
func (r *reader) bucketID(at strictyaml.Field) map[string]string {
	f, ok := r.Fields(at, nil)
	if !ok {
		return nil
	}
	entries, bytes := make(map[string]string), 0
	for _, one := range f.List {
		entries[one.Name], _ = r.Text(one, 0, MaxQuotaText)
		bytes += len(one.Name) + len(entries[one.Name])
	}
	if n := len(f.List); n == 0 || n > MaxQuotaEntries || bytes > MaxQuotaText || f.Field("").Given() {
		r.Fail(at.Node, at.Path, `must have 1 to %d entries with names and %d bytes, such as {name: api, tenant: "*"}`,
			MaxQuotaEntries, MaxQuotaText)
	}
	return entries
}

// keyTemplate reads a text in which {name} stands for the value of an entry, and {{ and }} for braces.
func (r *reader) keyTemplate(at strictyaml.Field, text string, entries map[string]string) (parts []string) {
	part := ""
	for rest := text; rest != ""; {
		switch i := strings.IndexAny(rest, "{}"); {
		case i < 0:
			part, rest = part+rest, ""
		case strings.HasPrefix(rest[i:], "{{"), strings.HasPrefix(rest[i:], "}}"):
			part, rest = part+rest[:i+1], rest[i+2:]
		default:
			end := strings.IndexByte(rest[i:], '}')
			if rest[i] == '}' || end < 0 {
				r.Fail(at.Node, at.Path, "has a brace without its other one: write {name} for the value of an entry, {{ and }} for braces")
				return nil
			}
			name := rest[i+1 : i+end]
			if _, known := entries[name]; !known && entries != nil {
				r.Fail(at.Node, at.Path, "names the entry %s, which the bucket does not have", strictyaml.Show(name))
				return nil
			}
			parts = append(parts, part+rest[:i], name)
			part, rest = "", rest[i+end+1:]
		}
	}
	return append(parts, part)
}
