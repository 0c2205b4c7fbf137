BEGIN TRANSACTION;
CREATE TABLE counts (
        scope TEXT PRIMARY KEY,
        jobs INTEGER NOT NULL,
        bytes INTEGER NOT NULL
    ) WITHOUT ROWID;
INSERT INTO "counts" VALUES('server',0,0);
INSERT INTO "counts" VALUES('tenant a',0,0);
CREATE TABLE curve_points (
        model_id TEXT NOT NULL,
        kind TEXT NOT NULL,
        n INTEGER NOT NULL,
        position INTEGER NOT NULL,
        point TEXT NOT NULL,
        PRIMARY KEY (model_id, kind, n)
    ) WITHOUT ROWID;
INSERT INTO "curve_points" VALUES('a','forward_backward',0,1,'{"kind":"forward_backward","position":1,"loss_sum":0.25,"tokens":1,"weight":1.0,"step":null,"learning_rate":null,"grad_norm":null,"time_s":1795360786.4623957}');
INSERT INTO "curve_points" VALUES('a','forward_backward',1,2,'{"kind":"forward_backward","position":2,"loss_sum":0.375,"tokens":1,"weight":1.0,"step":null,"learning_rate":null,"grad_norm":null,"time_s":1795360786.4785771}');
INSERT INTO "curve_points" VALUES('a','forward_backward',2,4,'{"kind":"forward_backward","position":4,"loss_sum":-1.646625280380249,"tokens":1,"weight":1.0,"step":null,"learning_rate":null,"grad_norm":null,"time_s":1795360786.5232506}');
INSERT INTO "curve_points" VALUES('a','optim_step',0,3,'{"kind":"optim_step","position":3,"loss_sum":null,"tokens":null,"weight":null,"step":1,"learning_rate":0.01,"grad_norm":61.96773353931867,"time_s":1795360786.4853203}');
CREATE TABLE curves (
        model_id TEXT NOT NULL,
        kind TEXT NOT NULL,
        points INTEGER NOT NULL,
        PRIMARY KEY (model_id, kind)
    ) WITHOUT ROWID;
INSERT INTO "curves" VALUES('a','forward_backward',3);
INSERT INTO "curves" VALUES('a','optim_step',1);
CREATE TABLE jobs (
        n INTEGER PRIMARY KEY,
        request_id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        kind TEXT NOT NULL,
        scope TEXT NOT NULL,
        seq INTEGER NOT NULL,
        model_id TEXT,
        position INTEGER,
        base_model TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('held', 'ready', 'done', 'expired')),
        worker INTEGER,
        release INTEGER NOT NULL,
        attempts INTEGER NOT NULL,
        size INTEGER NOT NULL,
        created_s REAL NOT NULL,
        finished_s REAL,
        digest BLOB,
        halvings INTEGER,
        completion INTEGER,
        usage TEXT,
        category TEXT,
        error TEXT,
        content_type TEXT,
        body BLOB,
        UNIQUE (tenant, scope, seq)
    );
INSERT INTO "jobs" VALUES(1,'req_2ufolg4boneoyp3wzrz6itvatl','a','create_model','a',0,'a',0,'tuneserve/fake','done',1,2,0,100,1.79536078643573904041e+09,1.7953607864507145882e+09,X'CA7BE3F0039E0BD7AE64AEEEC92503B8',0,NULL,'{"device_s":0.0003141269990010187,"trained_tokens":0,"prompt_tokens":0,"sampled_tokens":0,"padded_tokens":0,"flops":0.0,"queued_s":0.00014439500228036195,"ran_s":0.0012711629969999194,"others":0,"total_s":0.0}',NULL,NULL,'application/json',X'7B226D6F64656C5F6964223A202261222C202274797065223A20226372656174655F6D6F64656C227D');
INSERT INTO "jobs" VALUES(2,'req_lyi4cjwycubwj2ay76ygggc77d','a','forward_backward','a',1,'a',1,'tuneserve/fake','done',1,3,0,58,1.79536078645307445528e+09,1.79536078646239566801e+09,X'FB7376CA1ADEF10CD056DE8E59440EC4',0,NULL,'{"device_s":0.0003926150020561181,"trained_tokens":1,"prompt_tokens":0,"sampled_tokens":0,"padded_tokens":15,"flops":4000.0,"queued_s":0.00022106999676907435,"ran_s":0.0019841039975290187,"others":0,"total_s":0.0}',NULL,NULL,'application/x-protobuf',X'0A0B41727261795265636F726412370A0B41727261795265636F726412260A086C6F6770726F6273121A0A04000080BE121000000000000000000400000000000000180118011A130A086C6F73733A73756D11000000000000D03F');
INSERT INTO "jobs" VALUES(3,'req_c5utnbtkcgkmmzycuntrykcalt','a','forward_backward','a',2,'a',2,'tuneserve/fake','done',1,4,0,58,1.79536078646530604364e+09,1.79536078647857713693e+09,X'5FF5D931B998BD8553DBDD5A908C5C90',0,NULL,'{"device_s":0.0003215590040781535,"trained_tokens":1,"prompt_tokens":0,"sampled_tokens":0,"padded_tokens":15,"flops":4000.0,"queued_s":0.0002451050022500567,"ran_s":0.004684019993874244,"others":0,"total_s":0.0}',NULL,NULL,'application/x-protobuf',X'0A0B41727261795265636F726412370A0B41727261795265636F726412260A086C6F6770726F6273121A0A040000C0BE121000000000000000000400000000000000180118011A130A086C6F73733A73756D11000000000000D83F');
INSERT INTO "jobs" VALUES(4,'req_v5tgjbmquqnn5a7kc4nrj7ivgi','a','optim_step','a',3,'a',3,'tuneserve/fake','done',1,5,0,121,1.79536078648111557961e+09,1.79536078648532032965e+09,X'A161380A2A559364470FB73E9DBDFFDC',0,NULL,'{"device_s":0.0006737230069120415,"trained_tokens":0,"prompt_tokens":0,"sampled_tokens":0,"padded_tokens":0,"flops":0.0,"queued_s":0.00016754999523982406,"ran_s":0.001997924999159295,"others":0,"total_s":0.0}',NULL,NULL,'application/json',X'7B226D657472696373223A207B22677261645F6E6F726D223A2036312E39363737333335333933313836377D7D');
INSERT INTO "jobs" VALUES(5,'req_rvol4jrys7biynlqcfuqpdkfko','a','forward_backward','a',4,'a',4,'tuneserve/fake','done',2,7,0,58,1.79536078651139473913e+09,1.79536078652325057983e+09,X'7EB9DD26A3A4B6CDBA0732805B44D224',0,NULL,'{"device_s":0.0004134359987801872,"trained_tokens":1,"prompt_tokens":0,"sampled_tokens":0,"padded_tokens":15,"flops":4000.0,"queued_s":0.007463444999302737,"ran_s":0.0015724510012660176,"others":0,"total_s":0.0}',NULL,NULL,'application/x-protobuf',X'0A0B41727261795265636F726412370A0B41727261795265636F726412260A086C6F6770726F6273121A0A049EC4D23F121000000000000000000400000000000000180118011A130A086C6F73733A73756D11000000C09358FABF');
CREATE TABLE lanes (
        model_id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        base_model TEXT NOT NULL,
        next INTEGER NOT NULL,
        worker INTEGER,
        park INTEGER NOT NULL,
        jobs INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        requested_s REAL NOT NULL
    ) WITHOUT ROWID;
INSERT INTO "lanes" VALUES('a','a','tuneserve/fake',5,2,0,0,0,1.79536078651139473913e+09);
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT INTO "meta" VALUES('completion',0);
INSERT INTO "meta" VALUES('epoch',2);
INSERT INTO "meta" VALUES('release',7);
INSERT INTO "meta" VALUES('secret',X'43DD2C1DA209415DBE2644A4AA5DDF8CE329F9609BEF5652E0FDA5A50DFC94B5');
INSERT INTO "meta" VALUES('version',4);
CREATE TABLE payloads (job INTEGER PRIMARY KEY, payload BLOB NOT NULL);
INSERT INTO "payloads" VALUES(1,X'82AA626173655F6D6F64656CAE74756E6573657276652F66616B65A6636F6E66696786A472616E6B04A5616C706861CB4020000000000000A47365656401AA747261696E5F6174746EC3A9747261696E5F6D6C70C3AD747261696E5F756E656D626564C3');
INSERT INTO "payloads" VALUES(2,X'1A290A080A060A0401000000121D0A0D7461726765745F746F6B656E73120C0A0800000000000000001802220D63726F73735F656E74726F7079');
INSERT INTO "payloads" VALUES(3,X'1A290A080A060A0402000000121D0A0D7461726765745F746F6B656E73120C0A0800000000000000001802220D63726F73735F656E74726F7079');
INSERT INTO "payloads" VALUES(4,X'81A6706172616D7386AD6C6561726E696E675F72617465CB3F847AE147AE147BA56265746131CB3FECCCCCCCCCCCCDA56265746132CB3FEE666666666666A3657073CB3D719799812DEA11AC7765696768745F6465636179CB0000000000000000AE677261645F636C69705F6E6F726DCB0000000000000000');
INSERT INTO "payloads" VALUES(5,X'1A290A080A060A0403000000121D0A0D7461726765745F746F6B656E73120C0A0800000000000000001802220D63726F73735F656E74726F7079');
CREATE TABLE points (
        n INTEGER PRIMARY KEY AUTOINCREMENT,
        model_id TEXT NOT NULL,
        position INTEGER NOT NULL,
        file_id TEXT NOT NULL,
        numerics_id TEXT NOT NULL
    );
INSERT INTO "points" VALUES(1,'a',4,'04f4bd0c829840a1849e5440e04e2495','fake-1');
CREATE TABLE records (
        n INTEGER PRIMARY KEY AUTOINCREMENT,
        type TEXT NOT NULL,
        key TEXT NOT NULL,
        tenant TEXT NOT NULL,
        parent TEXT NOT NULL,
        body TEXT NOT NULL,
        UNIQUE (type, key)
    );
INSERT INTO "records" VALUES(1,'model','a','a','s','{"key":"a","tenant":"a","parent":"s","base_model":"tuneserve/fake","config":{"rank":4,"alpha":8.0,"seed":1,"train_attn":true,"train_mlp":true,"train_unembed":true},"created_s":0.0,"last_request_s":1795360786.5113947,"status":"ready","diverged":false,"user_metadata":{}}');
CREATE TABLE served (
        base_model TEXT PRIMARY KEY,
        seen_s REAL NOT NULL,
        info TEXT NOT NULL
    ) WITHOUT ROWID;
INSERT INTO "served" VALUES('tuneserve/fake',1.79536078651139473913e+09,'{"name":"tuneserve/fake","architecture":"fake","vocab_size":64,"context_length":64,"max_rank":32,"tokenizer_id":"tuneserve/fake","eos_token_ids":[63],"parameters":1000}');
CREATE TABLE usage (
        tenant TEXT NOT NULL,
        day INTEGER NOT NULL,
        name TEXT NOT NULL,
        requests INTEGER NOT NULL,
        device_s REAL NOT NULL,
        trained_tokens INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        sampled_tokens INTEGER NOT NULL,
        padded_tokens INTEGER NOT NULL,
        flops REAL NOT NULL,
        PRIMARY KEY (tenant, day, name)
    ) WITHOUT ROWID;
INSERT INTO "usage" VALUES('a',20779,'a',5,2.11546001082751899957e-03,3,0,0,45,12000.0);
CREATE TABLE workers (
        epoch INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        base_model TEXT NOT NULL,
        samples INTEGER NOT NULL,
        seen_s REAL NOT NULL
    );
INSERT INTO "workers" VALUES(2,'worker','7a78b1c2573949b8b09a2568afb03da8','tuneserve/fake',0,1.7953607865133929252e+09);
CREATE INDEX lanes_placed ON lanes (worker) WHERE worker IS NOT NULL;
CREATE INDEX lanes_in_use ON lanes (tenant) WHERE worker IS NOT NULL OR jobs > 0;
CREATE INDEX jobs_ready ON jobs (worker, release) WHERE state = 'ready';
CREATE INDEX jobs_unfinished ON jobs (model_id, state) WHERE state IN ('held', 'ready');
CREATE INDEX jobs_sampling ON jobs (scope) WHERE kind = 'sample' AND state IN ('held', 'ready');
CREATE INDEX jobs_done ON jobs (finished_s) WHERE state = 'done';
CREATE INDEX jobs_expired ON jobs (finished_s) WHERE state = 'expired' AND digest IS NULL AND (position IS NULL OR release > 0);
CREATE UNIQUE INDEX jobs_log ON jobs (model_id, position) WHERE position IS NOT NULL;
CREATE INDEX jobs_kept ON jobs (model_id, position) WHERE digest IS NOT NULL;
CREATE INDEX jobs_completed ON jobs (tenant, scope, seq / 1000000000, completion) WHERE completion IS NOT NULL;
CREATE INDEX jobs_loads ON jobs (model_id)
        WHERE kind = 'load_weights' AND digest IS NOT NULL;
CREATE INDEX points_by_model ON points (model_id, n);
CREATE INDEX records_by_tenant ON records (type, tenant, n);
CREATE INDEX records_by_parent ON records (type, parent, n);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('records',6);
INSERT INTO "sqlite_sequence" VALUES('points',1);
COMMIT;
