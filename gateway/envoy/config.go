package envoy

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/limit"
)

// This file reads configuration files into a Config, which never changes afterwards. Parse makes a reader for each
// file; reader.file finds the domain, descriptors reads the tree of nodes, limit and rate read a rule, quotas
// (quota.go) the quota buckets. match.go looks up rules in the tree. A field must be listed in rootFields,
// descriptorFields or limitFields to be accepted.

// File is one configuration file. Name is for errors.
type File struct {
	Name string
	Data []byte
}

// Options say how files are read. The zero value is the reference's behaviour.
type Options struct {
	// MergeDomains allows several files to describe one domain (the reference's MERGE_DOMAIN_CONFIG). Otherwise that is
	// an error.
	MergeDomains bool
	// Quotable, when set, returns an error when the limits of a policy cannot be divided among data planes. It is
	// called for the policies in quota_buckets.
	Quotable func(policy string) error
}

// Config is the contents of configuration files. It never changes, and is safe for concurrent use.
type Config struct {
	domains map[string]*domain
	limits  int
	hash    [sha256.Size]byte
}

// Hash returns a hash of the files' names and contents. It does not depend on their directory, so that nodes can
// compare it.
func (c *Config) Hash() [sha256.Size]byte { return c.hash }

// Domains returns the number of domains, and of limits in them.
func (c *Config) Domains() (domains, limits int) { return len(c.domains), c.limits }

// domain is the limits of one domain. Its node is the root of the descriptors, and has no limit.
type domain struct {
	node
	name, namespace string
	file            string // the first file that describes it
	line            int
	charge          charge // for limits in requests
	quotas          []quotaBucket
}

// node is one descriptor of a file.
type node struct {
	// children are by key, or by key and value joined by an underscore, as in the reference.
	children  map[string]*node
	wildcards []pattern // the children with an *, in the order of the files
	limit     *rule     // nil: none
	value     string    // value in the file; empty: none
	pattern   string    // with share_threshold: the text that replaces the value in the state's key
	byValue   bool      // value_to_metric
	file      string
	line      int
}

// pattern is a child whose composite key has one * or more. An * stands for any text, also the empty one.
type pattern struct {
	*node
	parts []string // the texts before, between and after the *
}

// matches says whether a composite key fits the pattern.
func (p *pattern) matches(composite string) bool {
	last := len(p.parts) - 1
	rest, ok := strings.CutPrefix(composite, p.parts[0])
	if !ok {
		return false
	}
	if rest, ok = strings.CutSuffix(rest, p.parts[last]); !ok {
		return false
	}
	for _, part := range p.parts[1:last] {
		if _, rest, ok = strings.Cut(rest, part); !ok {
			return false
		}
	}
	return true
}

// rule is one limit of a file or of a request.
type rule struct {
	fullKey  string // domain and keys, joined by dots: the name in metrics
	name     string
	replaces []string

	unlimited bool
	perUnit   uint32
	unit      ratelimitv3.RateLimitResponse_RateLimit_Unit
	multiple  uint32 // unit_multiplier in the file; 0: none

	limit  *algo.Limit // of the state; nil when unlimited or a policy's
	policy string      // name of the policy that decides in place of limit; empty: none
	charge charge

	shadow, quota, detailed bool
	metadata                *structpb.Struct
}

// charge says what is charged when descriptors are refused.
type charge uint8

const (
	chargeAlways      charge = iota // all hits, as in the reference
	chargeIndependent               // the hits of each descriptor that is admitted
	chargeAllOrNone                 // nothing unless all descriptors of the request are admitted
)

var chargeWords = []string{"always", "independent", "all_or_none"}

var (
	rootFields       = []string{"domain", "descriptors", "charge", "quota_buckets"}
	descriptorFields = []string{"key", "value", "rate_limit", "descriptors", "shadow_mode", "quota_mode",
		"detailed_metric",
		"value_to_metric", "share_threshold", "metadata"}
	limitFields = []string{"unit", "requests_per_unit", "unit_multiplier", "unlimited", "name", "replaces",
		"algorithm", "capacity", "carry_debt", "max_debt", "charge", "policy"}
	// Without leaky_bucket, because the protocol cannot express its delays, and concurrency, because it cannot release
	// leases.
	algorithmWords = []string{"fixed_window", "sliding_window", "sliding_counter", "sliding_log", "token_bucket"}
)

// Bounds of what a file may describe.
const (
	maxDepth    = 32
	maxNested   = 32        // levels of maps and lists in a descriptor's metadata
	maxMetadata = 256 << 10 // bytes of a descriptor's metadata as JSON
)

// units are the reference's units. A month has 30 days, a year 365.
var units = map[string]struct {
	number ratelimitv3.RateLimitResponse_RateLimit_Unit
	length time.Duration
}{
	"SECOND": {ratelimitv3.RateLimitResponse_RateLimit_SECOND, time.Second},
	"MINUTE": {ratelimitv3.RateLimitResponse_RateLimit_MINUTE, time.Minute},
	"HOUR":   {ratelimitv3.RateLimitResponse_RateLimit_HOUR, time.Hour},
	"DAY":    {ratelimitv3.RateLimitResponse_RateLimit_DAY, day},
	"WEEK":   {ratelimitv3.RateLimitResponse_RateLimit_WEEK, 7 * day},
	"MONTH":  {ratelimitv3.RateLimitResponse_RateLimit_MONTH, 30 * day},
	"YEAR":   {ratelimitv3.RateLimitResponse_RateLimit_YEAR, 365 * day},
}

const day = 24 * time.Hour

// hashOf computes Config.Hash.
func hashOf(files []File) [sha256.Size]byte {
	plain := make([]File, len(files))
	for i, f := range files {
		plain[i] = File{Name: filepath.Base(f.Name), Data: f.Data}
	}
	return sha256.Sum256(pack(plain))
}

// Parse reads configuration files in their order. The error is strictyaml.Errors: every mistake in all files, with its
// position. No files, and files without descriptors, are valid.
func Parse(files []File, opts Options) (*Config, error) {
	c := &Config{domains: make(map[string]*domain), hash: hashOf(files)}
	var all strictyaml.Errors
	for _, f := range files {
		r := &reader{Decoder: strictyaml.New(f.Name, f.Data), config: c, opts: opts}
		r.Plain = true
		r.file()
		all = append(all, r.Sorted()...)
	}
	if len(all) > 0 {
		return nil, all
	}
	return c, nil
}

// Looks says whether a file looks like one of these and not like a policy file: it has a domain or descriptors, and no
// policies before.
func Looks(data []byte) bool {
	root := strictyaml.New("", data).Root().Node
	if root == nil || root.Kind != yaml.MappingNode {
		return false
	}
	for i := 0; i < len(root.Content); i += 2 {
		switch root.Content[i].Value {
		case "policies":
			return false
		case "domain", "descriptors":
			return true
		}
	}
	return false
}

// reader reads one file.
type reader struct {
	*strictyaml.Decoder
	config *Config
	opts   Options
}

func (r *reader) file() {
	root := r.Root()
	if root.Node == nil {
		if r.Count() == 0 {
			r.Add(1, 1, "domain", "is missing: add it, such as domain: edge")
		}
		return
	}
	top, ok := r.Fields(root, rootFields, "descriptors", "quota_buckets")
	if !ok {
		return
	}
	f := r.Required(top, "domain", "edge")
	name, given := r.Text(f, 1, limit.MaxNamespace-len(limit.EnvoyNamespace))
	mode := r.charge(top, chargeAlways)
	d := &domain{name: name, namespace: limit.EnvoyNamespace + name, file: r.File, charge: mode,
		node: node{children: make(map[string]*node)}}
	if given {
		d.line = f.Node.Line
		if known := r.config.domains[name]; known == nil {
			r.config.domains[name] = d
		} else if r.opts.MergeDomains {
			d = known
		} else {
			r.Fail(f.Node, f.Path, "is the domain of %s, line %d, too: describe it in one file, or let files be merged (envoy-merge-domains)", known.file, known.line)
		}
	}
	r.descriptors(top.Field("descriptors"), &d.node, d.name, mode, 1)
	r.quotas(top.Field("quota_buckets"), d)
}

// flag reads a boolean; a missing one is false. As in YAML 1.1, which the reference reads, y, yes and on are true.
func (r *reader) flag(f strictyaml.Fields, name string) bool {
	one := f.Field(name)
	if n := one.Node; n != nil && n.Kind == yaml.ScalarNode && n.Tag == "!!str" && n.Style == 0 {
		switch n.Value {
		case "y", "Y", "yes", "Yes", "YES", "on", "On", "ON":
			return true
		case "n", "N", "no", "No", "NO", "off", "Off", "OFF":
			return false
		}
	}
	return r.Boolean(one)
}

func (r *reader) charge(f strictyaml.Fields, otherwise charge) charge {
	if i := slices.Index(chargeWords, r.Choice(f.Field("charge"), chargeWords...)); i >= 0 {
		return charge(i)
	}
	return otherwise
}

// descriptors reads a list of descriptors into a node.
func (r *reader) descriptors(list strictyaml.Field, into *node, parent string, mode charge, depth int) {
	if list.Given() && depth > maxDepth { // also an alias of a list that it is in
		r.Fail(list.Key, list.Path, "is nested more than %d deep", maxDepth)
		return
	}
	for f := range r.Maps(list,
		"descriptors, such as {key: remote_address, rate_limit: {unit: second, requests_per_unit: 10}}",
		descriptorFields,
		"value", "descriptors", "rate_limit", "metadata") {
		r.descriptor(f, into, parent, mode, depth)
	}
}

func (r *reader) descriptor(f strictyaml.Fields, into *node, parent string, mode charge, depth int) {
	key := r.Required(f, "key", "remote_address")
	name, ok := r.Text(key, 1, strictyaml.MaxFile)
	own := &node{children: make(map[string]*node), file: r.File, line: f.At.Line}
	if value := f.Field("value"); value.Given() {
		text, good := r.Text(value, 0, strictyaml.MaxFile)
		if ok = ok && good; text != "" {
			own.value, name = text, name+"_"+text
		}
	}
	fullKey := parent + "." + name
	if ok {
		if twice := into.children[name]; twice != nil {
			where := fmt.Sprintf("line %d", twice.line)
			if twice.file != r.File {
				where += " of " + twice.file
			}
			r.Fail(key.Node, f.Path, "is the second descriptor of the composite key %s, after that on %s: remove one",
				strictyaml.Show(fullKey), where)
		} else {
			into.children[name] = own
			if strings.Contains(name, "*") {
				into.wildcards = append(into.wildcards, pattern{own, strings.Split(name, "*")})
			}
		}
	}
	shadow, quota, detailed := r.flag(f, "shadow_mode"), r.flag(f, "quota_mode"), r.flag(f, "detailed_metric")
	own.byValue = r.flag(f, "value_to_metric")
	if share := f.Field("share_threshold"); r.flag(f, "share_threshold") && ok {
		if strings.Contains(name, "*") {
			own.pattern = cmp.Or(own.value, name)
		} else {
			r.Fail(share.Key, share.Path, "is for values with an *, and this descriptor's composite key is %s",
				strictyaml.Show(name))
		}
	}
	metadata := r.metadata(f)
	if l := r.limit(f.Field("rate_limit"), fullKey, mode); l != nil {
		l.shadow, l.quota, l.detailed, l.metadata = shadow, quota, detailed, metadata
		own.limit = l
		r.config.limits++
	}
	r.descriptors(f.Field("descriptors"), own, fullKey, mode, depth+1)
}

// limit reads a rate_limit; nil when it is missing or invalid.
func (r *reader) limit(at strictyaml.Field, fullKey string, mode charge) *rule {
	f, ok := r.Fields(at, limitFields, "replaces")
	if !ok {
		return nil
	}
	before := r.Count()
	out := &rule{fullKey: fullKey}
	out.charge = r.charge(f, mode)
	out.name, _ = r.Text(f.Field("name"), 0, strictyaml.MaxFile)
	r.replaces(f, out)
	out.unlimited = r.flag(f, "unlimited")
	own := []string{"unit", "unit_multiplier", "algorithm", "capacity", "carry_debt", "max_debt"}
	if policy := f.Field("policy"); policy.Given() {
		out.policy = r.policyName(policy)
		r.beside("policy", f.Only(append(own, "requests_per_unit", "unlimited")...))
	} else if out.unlimited {
		r.beside("unlimited", f.Only(own...))
	} else {
		r.rate(f, out)
	}
	if r.Count() > before {
		return nil
	}
	return out
}

// policyName reads the name of a policy; empty when it is invalid.
func (r *reader) policyName(f strictyaml.Field) string {
	name, ok := r.Text(f, 0, strictyaml.MaxFile)
	if ok && !limit.ValidPolicyName(name) {
		r.Fail(f.Node, f.Path, "is not a policy's name: 1 to 128 characters of A-Z a-z 0-9 . _ -")
		return ""
	}
	return name
}

func (r *reader) replaces(f strictyaml.Fields, out *rule) {
	for entry := range r.Maps(f.Field("replaces"), "names of limits, such as {name: of_the_other}", []string{"name"}) {
		one := r.Required(entry, "name", "of_the_other")
		switch name, ok := r.Text(one, 1, strictyaml.MaxFile); {
		case !ok:
		case name == out.name:
			r.Fail(one.Node, one.Path, "is the name of this very limit, which cannot replace itself")
		default:
			out.replaces = append(out.replaces, name)
		}
	}
}

// beside rejects fields that do not go with the one of a name.
func (r *reader) beside(name string, fields []strictyaml.Field) {
	for _, one := range fields {
		r.Fail(one.Key, one.Path, "stands beside %s: remove one of them", name)
	}
}

// rate reads a limit that the file defines.
func (r *reader) rate(f strictyaml.Fields, out *rule) {
	before := r.Count()
	l := algo.Limit{Algorithm: algo.FixedWindow, Period: algo.Epoch}
	one := r.Required(f, "unit", "minute")
	if word, ok := r.Text(one, 0, strictyaml.MaxFile); ok {
		u, known := units[strings.ToUpper(word)]
		if !known {
			r.Fail(one.Node, one.Path, "must be one of second, minute, hour, day, week, month and year, not %s",
				strictyaml.Show(word))
		}
		out.unit, l.Window = u.number, u.length
	}
	out.perUnit = uint32(r.Integer(f.Field("requests_per_unit"), 0, math.MaxUint32))
	multiplier := f.Field("unit_multiplier")
	out.multiple = uint32(r.Integer(multiplier, 1, math.MaxUint32))
	if out.multiple > 0 && l.Window > 0 {
		if int64(out.multiple) > int64(algo.MaxWindow/l.Window) {
			r.Fail(multiplier.Node, multiplier.Path, "makes a window longer than the longest, 366 days")
		}
		l.Window *= time.Duration(out.multiple)
	}
	word := r.Choice(f.Field("algorithm"), algorithmWords...)
	if a, known := algo.ParseAlgorithm(word); known && a != algo.FixedWindow {
		l.Algorithm, l.Period = a, 0
	}
	l.Capacity = r.Integer(f.Field("capacity"), 1, math.MaxUint32)
	l.CarryDebt = r.flag(f, "carry_debt")
	l.MaxDebt = r.Integer(f.Field("max_debt"), 1, algo.MaxLimit)
	// The state of a limit of 0 counts under a limit of 1: see Service.conclude.
	l.Limit = max(int64(out.perUnit), 1)
	out.limit = &l
	if wrong, bad := l.Validate().(*algo.FieldError); bad && r.Count() == before {
		name := strings.Replace(wrong.Field, "limit", "requests_per_unit", 1)
		r.Fail(cmp.Or(f.Field(name).Key, f.At), strictyaml.Join(f.Path, name), "%s", wrong.Message)
	}
}

// metadata reads a descriptor's part of the dynamic metadata: a map that JSON can express.
func (r *reader) metadata(f strictyaml.Fields) *structpb.Struct {
	one := f.Field("metadata")
	if one.Node == nil {
		return nil
	}
	if one.Node.Kind != yaml.MappingNode {
		r.Fail(one.Node, one.Path, "must be a map, not %s", strictyaml.Kind(one.Node))
		return nil
	}
	textKeys(one.Node)
	var v map[string]any
	err := one.Node.Decode(&v)
	text, bad := json.Marshal(v)
	out := new(structpb.Struct)
	if err = cmp.Or(err, bad); err == nil {
		err = protojson.UnmarshalOptions{RecursionLimit: maxNested}.Unmarshal(text, out)
	}
	switch {
	case err != nil:
		r.Fail(one.Node, one.Path, "is nothing that JSON can say in %d levels: %.100q", maxNested, err)
	case len(text) > maxMetadata:
		r.Fail(one.Node, one.Path, "has %d bytes in JSON, at most %d are taken", len(text), maxMetadata)
	}
	return out
}

// textKeys makes text of the keys of maps that YAML reads as numbers or booleans, since keys in JSON are text.
func textKeys(n *yaml.Node) {
	for i, c := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 0 && slices.Contains(strictyaml.PlainTags, c.Tag) {
			c.Tag = "!!str"
		}
		textKeys(c)
	}
}
